"""Guards against collapse: alarm levels of metrics, and actions after alarms.

Signs of a collapse are an update that moves the policy far (`ratio/kl`) or is
expected to (`filter/fisher_mean`), a change of entropy, longer responses, and
responses of the wrong form. `Guard.check` compares the metrics of an iteration
with levels and returns the alarms. Entropy and response length depend on model
and task; their levels are relative to the first iterations of the run.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from gigpo_jax import options

# warn: a line in the console. shrink: smaller steps from then on, too.
# rollback: smaller steps, from the last good checkpoint.
ACTIONS = ('warn', 'shrink', 'rollback')

# Metric: options of its lowest and of its highest value.
_ABSOLUTE = {
  'ratio/kl': ('', 'max_kl'),
  'filter/fisher_mean': ('', 'max_fisher'),
  'train/invalid_action_rate': ('', 'max_invalid_rate'),
}
_RELATIVE = {
  'loss/entropy': ('min_entropy', 'max_entropy'),
  'train/response_tokens': ('', 'max_response'),
}


@dataclasses.dataclass(frozen=True)
class GuardState:
  """What later checks of a run depend on.

  Attributes:
    start: values of the relative metrics in the first iterations.
    step_scale: factor of the policy's updates.
    rollbacks: number of rollbacks so far.
    good: iteration of the newest checkpoint whose policy raised no alarm in the
      iteration after it; -1 for the initial policy.
  """

  start: Mapping[str, tuple[float, ...]] = dataclasses.field(
    default_factory=dict
  )
  step_scale: float = 1.0
  rollbacks: int = 0
  good: int = -1

  def to_json(self) -> dict[str, Any]:
    """Returns plain values."""
    start = {name: list(values) for name, values in self.start.items()}
    return vars(self) | {'start': start}

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> 'GuardState':
    """Returns the state that `to_json` wrote."""
    start = {k: tuple(map(float, v)) for k, v in values['start'].items()}
    return cls(
      start,
      float(values['step_scale']),
      # Older releases have no rollbacks.
      int(values.get('rollbacks', 0)),
      int(values.get('good', -1)),
    )


@dataclasses.dataclass(frozen=True)
class Guard:
  """Options of the guards, `config.guard`; a level of 0 is off.

  Attributes:
    action: one of ACTIONS.
    max_kl: largest mean KL to the policy of the old log-probs, in nats per
      token. With `rollout.carry_over` and loss.old_log_probs=sampler this is
      the policy that sampled, so that it includes staleness.
    max_fisher: largest mean of `filter/fisher_mean`, in nats per token, which a
      selector measures before the update.
    max_invalid_rate: largest share of steps with an invalid response.
    min_entropy: smallest entropy, relative to the start.
    max_entropy: largest entropy, relative to the start.
    max_response: largest mean length of a response, relative to the start.
    start_iterations: the start is the mean of this many iterations.
    shrink_factor: factor of all later updates after an iteration with alarms,
      for actions 'shrink' and 'rollback'.
    max_rollbacks: number of rollbacks of a run; later alarms only shrink.
  """

  action: str = options.choice('warn', ACTIONS)
  max_kl: float = options.number(0.05, low=0, note='0 is off')
  max_fisher: float = options.number(0.0, low=0, note='0 is off')
  max_invalid_rate: float = options.number(0.4, low=0, high=1)
  min_entropy: float = options.number(0.05, low=0, below=1)
  max_entropy: float = options.number(2.0, low=0, note='0 is off')
  max_response: float = options.number(1.5, low=0, note='0 is off')
  start_iterations: int = options.number(3, low=1)
  shrink_factor: float = options.number(0.5, above=0, below=1)
  max_rollbacks: int = options.number(3, low=1)

  def __post_init__(self):
    options.check(self)

  @property
  def scales_updates(self) -> bool:
    """Whether updates may be scaled."""
    return self.action != 'warn'

  @property
  def rolls_back(self) -> bool:
    """Whether alarms restore a checkpoint."""
    return self.action == 'rollback'

  def step_scale(self, state: GuardState) -> float:
    """Returns the factor of the policy's updates."""
    return state.step_scale if self.scales_updates else 1.0

  def check(
    self,
    state: GuardState,
    metrics: Mapping[str, float],
    *,
    only_warn: bool = False,
  ) -> tuple[GuardState, list[str]]:
    """Returns the next state, and a line for each alarm.

    If the state counts one more rollback, the caller must roll back.

    Args:
      state: state after the previous iteration.
      metrics: metrics of an iteration; metrics that are missing, because there
        was no update, raise no alarm. A value that is not a number does.
      only_warn: whether alarms have no other effect, because the policy was
        not updated yet.
    """
    state = self._extend(state, metrics)
    lines = [
      line
      for name, bounds in _ABSOLUTE.items()
      if name in metrics
      for line in self._compare(name, metrics[name], bounds)
    ]
    for name, bounds in _RELATIVE.items():
      start = state.start.get(name, ())
      if name in metrics and len(start) >= self.start_iterations:
        mean = sum(start) / len(start)
        lines += self._compare(name, metrics[name], bounds, mean)
    if only_warn:
      return state, lines
    if lines and self.scales_updates:
      scale = state.step_scale * self.shrink_factor
      state = dataclasses.replace(state, step_scale=scale)
    if lines and self.rolls_back and state.rollbacks < self.max_rollbacks:
      state = dataclasses.replace(state, rollbacks=state.rollbacks + 1)
    return state, lines

  def metrics(self, state: GuardState, alarms: list[str]) -> dict[str, float]:
    """Returns metrics of an iteration; none before the first alarm."""
    values = {'guard/alarms': float(len(alarms))} if alarms else {}
    scale = self.step_scale(state)
    if scale != 1:
      values['guard/step_scale'] = scale
    if state.rollbacks:
      values['guard/rollbacks'] = float(state.rollbacks)
    return values

  def _extend(
    self, state: GuardState, metrics: Mapping[str, float]
  ) -> GuardState:
    """Returns the state with the values of a first iteration."""
    start = dict(state.start)
    for name in _RELATIVE:
      values = start.get(name, ())
      value = metrics.get(name, math.nan)
      if math.isfinite(value) and len(values) < self.start_iterations:
        start[name] = (*values, value)
    return dataclasses.replace(state, start=start)

  def _compare(
    self,
    name: str,
    value: float,
    bounds: tuple[str, str],
    unit: float | None = None,
  ) -> list[str]:
    """Returns a line for each bound that a value exceeds.

    Args:
      name: name of the metric.
      value: its value.
      bounds: options of its lowest and highest value.
      unit: value at the start, for bounds that are relative to it.
    """
    lines = []
    for option, sign, side in zip(
      bounds, (1, -1), ('below', 'above'), strict=True
    ):
      level = getattr(self, option) if option else 0
      limit = level * (1 if unit is None else unit)
      if level and not sign * value >= sign * limit:
        relative = '' if unit is None else f' of {unit:.3g} at the start'
        lines.append(
          f'{name}={value:.3g}: {side} guard.{option}={level:g}{relative}'
        )
    return lines
