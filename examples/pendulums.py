# SPDX-License-Identifier: Apache-2.0
"""A policy that is trained on a simulation which is not JAX's, in the simulation's own memory.

Inverted pendulums, simulated by a CUDA kernel of CuPy's, or by NumPy on the CPU, which own angle, speed and
torque of all of them. A JAX program reads the state where it is, writes the torques where the simulation
wants them, lets it advance, and improves the policy by the gradient of a short forecast of its own. Beside
it: the same with copies, as it is done where JAX cannot use memory of others.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxbridge

DT = 0.02  # seconds
GRAVITY, FRICTION, LIMIT = 9.0, 0.1, 15.0  # 1/s^2, 1/s, and the largest torque in 1/s^2
HORIZON = 12  # steps of the forecast
RATE = 0.6

KERNEL = r"""
extern "C" __global__ void advance(float* state, const float* torque, int n, unsigned seed) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float angle = state[i], speed = state[n + i];
  speed += %(dt)ff * (%(gravity)ff * sinf(angle) - %(friction)ff * speed + torque[i]);
  angle += %(dt)ff * speed;
  if (fabsf(angle) > 1.f) {  // fallen: put up again, not quite upright
    unsigned r = (i + 1) * 2654435761u ^ seed * 2246822519u;
    angle = 0.4f * ((r >> 8 & 0xffff) / 65536.f - 0.5f);
    speed = 0.f;
  }
  state[i] = angle; state[n + i] = speed;
}
"""


class Simulation:
    """Owns the state, (2, n): angles and speeds; and the torques, (n,)."""

    def __init__(self, n: int, on_cuda: bool) -> None:
        self.n, self.on_cuda = n, on_cuda
        if on_cuda:
            import cupy

            constants = {"dt": DT, "gravity": GRAVITY, "friction": FRICTION}
            self.kernel = cupy.RawKernel(KERNEL % constants, "advance")
            self.state, self.torque = cupy.zeros((2, n), np.float32), cupy.zeros(n, np.float32)
        else:
            self.state, self.torque = jaxbridge.empty((2, n), "f4"), jaxbridge.empty((n,), "f4")
        self.begin()

    def begin(self) -> None:
        self.steps = 0
        self.pointers: set[tuple[int, int]] = set()  # of what it is given at each step
        start = 0.4 * (np.random.default_rng(0).random(self.n, np.float32) - 0.5)
        self.state[...] = 0
        if self.on_cuda:
            self.state[0].set(start)
        else:
            self.state[0] = start

    def advance(self, state, torque) -> None:
        """One step of time, on arrays of the simulation's own library."""
        self.steps += 1
        self.pointers.add((jaxbridge.pointer(state), jaxbridge.pointer(torque)))
        if self.on_cuda:
            blocks = (self.n + 255) // 256
            self.kernel((blocks,), (256,), (state, torque, self.n, np.uint32(self.steps)))
            return
        angle, speed = state
        speed += DT * (GRAVITY * np.sin(angle) - FRICTION * speed + torque)
        angle += DT * speed
        (fallen,) = np.nonzero(np.abs(angle) > 1)
        angle[fallen] = 0.4 * (np.random.default_rng(self.steps).random(fallen.size) - 0.5)
        speed[fallen] = 0


def act(policy, state):
    """The torque of each pendulum."""
    angle, speed = state
    return LIMIT * jnp.tanh(policy[0] * jnp.sin(angle) + policy[1] * speed)


def forecast(policy, state):
    """The mean cost of the next steps, as a model of JAX's sees them."""

    def one(state, _):
        angle, speed = state
        torque = act(policy, state)
        speed = speed + DT * (GRAVITY * jnp.sin(angle) - FRICTION * speed + torque)
        angle = angle + DT * speed
        return jnp.stack([angle, speed]), jnp.mean(angle**2 + 0.05 * speed**2)

    return jnp.mean(jax.lax.scan(one, state, None, length=HORIZON)[1])


def improved(policy, state):
    cost, slope = jax.value_and_grad(forecast)(policy, state)
    return policy - RATE * slope, cost


def in_place(simulation: Simulation, steps: int):
    """Everything in one program: the state is never anywhere but in the simulation's memory."""
    state, torque = jaxbridge.ref(simulation.state), jaxbridge.ref(simulation.torque)
    advance = jaxbridge.call(simulation.advance, None)

    @jax.jit
    def train(policy, state, torque):
        def step(policy, _):
            policy, cost = improved(policy, state[...])
            torque[...] = act(policy, state[...])
            advance(state, torque)
            return policy, cost

        return jax.lax.scan(step, policy, None, length=steps)

    # What XLA needs besides: for the forecast.
    beside = train.lower(jnp.zeros(2), state, torque).compile().memory_analysis()

    def checked(policy):
        out = train(policy, state, torque)
        with jaxbridge.borrow(state), jaxbridge.borrow(torque):  # the end of its last step
            where = (jaxbridge.pointer(simulation.state), jaxbridge.pointer(simulation.torque))
            assert simulation.pointers == {where}, "the simulation was given a copy"
        return out

    return checked, beside.temp_size_in_bytes


def with_copies(simulation: Simulation, steps: int):
    """The state goes to JAX and the torques come back, at every step."""

    @jax.jit
    def step(policy, state):
        policy, cost = improved(policy, state)
        return policy, cost, act(policy, state)

    def train(policy):
        costs = []
        for _ in range(steps):
            state = jaxbridge.from_external(simulation.state, copy=True)
            policy, cost, torque = step(policy, state)
            framework = "cupy" if simulation.on_cuda else "numpy"
            simulation.torque[...] = jaxbridge.to_external(torque, framework)
            simulation.advance(simulation.state, simulation.torque)
            costs.append(cost)
        return policy, jnp.stack(costs)

    beside = step.lower(jnp.zeros(2), jnp.zeros(simulation.state.shape)).compile().memory_analysis()
    copies = simulation.state.nbytes + simulation.torque.nbytes
    return train, beside.temp_size_in_bytes + copies


def run(make, n: int, steps: int, on_cuda: bool):
    """The policy, costs of all steps, microseconds for each, and bytes beside the state."""
    simulation = Simulation(n, on_cuda)
    train, memory = make(simulation, steps)
    for _ in range(2):  # the first compiles
        simulation.begin()
        start = time.perf_counter()
        policy, costs = jax.block_until_ready(train(jnp.zeros(2)))
        seconds = time.perf_counter() - start
        assert simulation.steps == steps
    return np.asarray(policy), np.asarray(costs), seconds / steps * 1e6, memory


def plot(results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, (_, costs, *_)), style in zip(results.items(), ("-", "--"), strict=True):
        left.plot(costs, style, label=name)
    left.set(xlabel="step", ylabel="mean cost of the forecast", yscale="log")
    left.legend()
    right.bar(list(results), [r[2] for r in results.values()])
    right.set(ylabel="microseconds per step")
    figure.savefig(path)


def count(text: str) -> int:
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {n}")
    return n


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--pendulums", type=count, default=1 << 14, help="how many are simulated")
    parser.add_argument("--steps", type=count, default=1000, help="of time, and of the training")
    parser.add_argument("--plot", type=Path, default=Path("pendulums.png"), help="file to write")
    options = parser.parse_args()
    on_cuda = jax.default_backend() in ("gpu", "cuda")
    results = {
        name: run(make, options.pendulums, options.steps, on_cuda)
        for name, make in (("in place", in_place), ("with copies", with_copies))
    }
    print(f"{options.pendulums} pendulums, {options.steps} steps, on {jax.default_backend()}")
    for name, (policy, costs, us, memory) in results.items():
        print(
            f"{name:12s} cost {costs[0]:.6f} -> {costs[-1]:.6f}, policy {policy.round(2)}, "
            f"{us:.0f} us per step, {memory / 1024:.0f} KiB beside the state"
        )
    try:
        plot(results, options.plot)
        print(f"wrote {options.plot}")
    except ImportError:
        print("no plot: pip install matplotlib")


if __name__ == "__main__":
    main()
