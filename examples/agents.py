"""Recurrent PPO with a Transformer-XL, a GRU or no memory, on tasks in which an agent must remember.

pip install -e '.[agents]'
python examples/agents.py                                  # CartPole without its velocities, all three, seed 0
python examples/agents.py --task recall --seeds 3          # an endless memory task: repeat a growing list

An agent acts step by step with the memory of its episode. It learns from windows of steps. Each window starts with the
memory it had when it was played, and clears it wherever an episode begins inside. With `same_length`, a step sees as many
earlier steps in a window as it saw while acting, so the first update starts from ratios of exactly 1.

An episode that a time limit cuts has not ended: what would have followed is worth the value of its last observation.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_xl as txl

N_ENV, WINDOW, EPOCHS, GROUPS = 16, 64, 4, 4
MEMORIES = ["transformer-xl", "gru", "none"]
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01

Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Observations, of a new episode where one is over; rewards; whether the old one ended, or was cut; its last observations."""


class CartPole:
    """CartPole-v1 of gymnasium without velocities: an agent sees where cart and pole are, but not how fast they move."""

    n_action, width = 2, 2
    scale = np.array([2.4, 0.21])  # an episode ends beyond these

    def __init__(self, seed: int) -> None:
        try:
            import gymnasium  # pyright: ignore[reportMissingImports]  # of the extra `agents`
        except ModuleNotFoundError:
            sys.exit("CartPole needs gymnasium: pip install -e '.[agents]'")
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        self.envs = gymnasium.make_vec("CartPole-v1", N_ENV, "sync", vector_kwargs={"autoreset_mode": mode})
        self.first = self.envs.reset(seed=seed)[0][:, ::2] / self.scale

    def step(self, actions: np.ndarray) -> Step:
        seen, reward, ended, cut, facts = self.envs.step(actions)
        last = seen.copy()
        for i in np.flatnonzero(ended | cut):
            last[i] = facts["final_obs"][i]
        return seen[:, ::2] / self.scale, np.asarray(reward), ended, cut, last[:, ::2] / self.scale


class Recall:
    """Each round shows one more of four signs; the agent then repeats all so far, in order. A mistake ends the episode."""

    n_action, width = 4, 6  # four signs, "now give the next one", "that was right"

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.lists: list[list[int]] = [[] for _ in range(N_ENV)]
        self.given = np.zeros(N_ENV, int)  # signs that each agent has repeated in this round
        self.first = np.stack([self.show(i) for i in range(N_ENV)])

    def show(self, i: int) -> np.ndarray:
        self.lists[i].append(int(self.random.integers(4)))
        self.given[i] = -1
        return np.eye(self.width)[self.lists[i][-1]]

    def step(self, actions: np.ndarray) -> Step:
        seen, reward, ended = np.zeros((N_ENV, self.width)), np.zeros(N_ENV), np.zeros(N_ENV, bool)
        for i, action in enumerate(actions):
            if self.given[i] >= 0:  # otherwise the agent was only shown a sign
                ended[i] = action != self.lists[i][self.given[i]]
                reward[i] = 0.0 if ended[i] else 0.1
            if ended[i]:
                self.lists[i] = []
            self.given[i] += 1
            if ended[i] or self.given[i] == len(self.lists[i]):
                seen[i] = self.show(i)
            else:
                seen[i, 4:] = 1, self.given[i] > 0
        return seen, reward, ended, np.zeros(N_ENV, bool), seen


class Agent(nn.Module):
    """A memory of some kind, then log-probabilities of actions and the value of the state."""

    def __init__(self, memory: str, task: Any, d: int = 64) -> None:
        super().__init__()
        self.memory, self.d = memory, d
        sizes = {"n_layer": 2, "d_model": d, "n_head": 2, "d_head": 32, "d_inner": 2 * d, "mem_len": WINDOW, "dropout": 0.0}
        better = {"same_length": True, "gate": "gru", "pre_lnorm": True, "final_norm": True}
        if memory == "transformer-xl":
            self.body = txl.TransformerXLBody(txl.TransformerXLConfig(**sizes, **better), d_input=task.width)
        else:
            self.look = nn.Sequential(nn.Linear(task.width, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh())
            self.gru = nn.GRUCell(d, 2 * d) if memory == "gru" else nn.Linear(d, 2 * d)
        self.actions = nn.Linear(d if memory == "transformer-xl" else 3 * d, task.n_action)
        self.value = nn.Linear(self.actions.in_features, 1)
        nn.init.zeros_(self.actions.weight)

    def begin(self) -> Any:
        return self.body.init_mems(N_ENV) if self.memory == "transformer-xl" else torch.zeros(N_ENV, 2 * self.d)

    def forward(self, seen_BTF: Tensor, state: Any, starts_BT: Tensor) -> tuple[Tensor, Tensor, Any]:
        if self.memory == "transformer-xl":
            y_BTD, state = self.body(seen_BTF, mems=state, rows=txl.Rows(document_starts=starts_BT))
        else:
            x_BTD, steps = self.look(seen_BTF), []
            for t in range(x_BTD.shape[1]):
                state = state * ~starts_BT[:, t, None]
                state = self.gru(x_BTD[:, t], state) if self.memory == "gru" else self.gru(x_BTD[:, t]).tanh()
                steps.append(torch.cat([x_BTD[:, t], state], dim=-1))
            y_BTD = torch.stack(steps, dim=1)
        return self.actions(y_BTD).log_softmax(-1), self.value(y_BTD).squeeze(-1), state


def rows_of(state: Any, rows: Tensor) -> Any:
    return state[rows] if isinstance(state, Tensor) else state.select(rows)


def train(memory: str, make_task: Callable[[int], Any], *, seed: int, n_step: int) -> list[float | None]:
    """Return the mean return of the episodes that were over in each tenth of training; None: none was."""
    torch.manual_seed(seed)
    task = make_task(seed)
    agent = Agent(memory, task)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    seen, starts, state = torch.as_tensor(task.first).float(), torch.ones(N_ENV, dtype=torch.bool), agent.begin()
    returns, running, n_window = [], np.zeros(N_ENV), max(1, n_step // (N_ENV * WINDOW))
    for window in range(n_window):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - window / n_window)
        first, played = state, []
        with torch.no_grad():
            for _ in range(WINDOW):
                scores, value, state = agent(seen[:, None], state, starts[:, None])
                action = torch.multinomial(scores[:, 0].exp(), 1)[:, 0]
                after, reward, ended, cut, last = task.step(action.numpy())
                running += reward
                returns += [(window, each) for each in running[ended | cut]]
                running[ended | cut] = 0
                if cut.any():  # the memory is still that of the old episode
                    _, beyond, _ = agent(torch.as_tensor(last).float()[:, None], state, torch.zeros(N_ENV, 1, dtype=torch.bool))
                    reward = reward + GAMMA * beyond[:, 0].numpy() * (cut & ~ended)
                chosen = scores[torch.arange(N_ENV), 0, action]
                played.append((seen, starts, action, chosen, value[:, 0], torch.as_tensor(reward)))
                seen, starts = torch.as_tensor(after).float(), torch.as_tensor(ended | cut)
            _, last, _ = agent(seen[:, None], state, starts[:, None])
        seen_BTF, starts_BT, action_BT, old_BT, value_BT, reward_BT = (torch.stack(x, dim=1) for x in zip(*played, strict=True))
        # generalized advantage estimation; no value follows the last step of an episode, unless its reward has it already
        ends_BT = torch.cat([starts_BT[:, 1:], starts[:, None]], dim=1)
        gain, advantage_BT = torch.zeros(N_ENV), torch.zeros(N_ENV, WINDOW)
        following = torch.cat([value_BT[:, 1:], last], dim=1)
        for t in reversed(range(WINDOW)):
            delta = reward_BT[:, t].float() + GAMMA * following[:, t] * ~ends_BT[:, t] - value_BT[:, t]
            gain = delta + GAMMA * LAMBDA * gain * ~ends_BT[:, t]
            advantage_BT[:, t] = gain
        target_BT = advantage_BT + value_BT
        advantage_BT = (advantage_BT - advantage_BT.mean()) / (advantage_BT.std() + 1e-8)
        for _ in range(EPOCHS):
            for rows in torch.randperm(N_ENV).chunk(GROUPS):
                scores, value, _ = agent(seen_BTF[rows], rows_of(first, rows), starts_BT[rows])
                new = scores.gather(-1, action_BT[rows].unsqueeze(-1)).squeeze(-1)
                ratio, gain = (new - old_BT[rows]).exp(), advantage_BT[rows]
                policy = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                entropy = -(scores.exp() * scores).sum(-1).mean()
                loss = policy + 0.5 * F.mse_loss(value, target_BT[rows]) - ENTROPY * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    n_part = min(10, n_window)
    parts = [[gain for at, gain in returns if at * n_part // n_window == i] for i in range(n_part)]
    return [float(np.mean(gains)) if gains else None for gains in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["cartpole", "recall"], default="cartpole")
    parser.add_argument("--memory", nargs="+", choices=MEMORIES, default=MEMORIES)
    parser.add_argument("--steps", type=int, default=300_000, help="of all environments together (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    if asked.seeds < 1:
        parser.error("--seeds must be at least 1")
    make_task = {"cartpole": CartPole, "recall": Recall}[asked.task]
    print("mean return in each tenth of training; -: no episode was over")
    for memory in asked.memory:
        for seed in range(asked.seeds):
            begin = time.perf_counter()
            tenths = train(memory, make_task, seed=seed, n_step=asked.steps)
            told = " ".join(f"{'-' if gain is None else f'{gain:.1f}':>6}" for gain in tenths)
            took = time.perf_counter() - begin
            print(f"{asked.task}, {memory:14}, seed {seed}: {told}  ({took:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
