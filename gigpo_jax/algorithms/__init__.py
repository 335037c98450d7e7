"""Registry of algorithms, which compute advantages from rows.

Each algorithm is a module with a frozen dataclass `Algorithm`. Its fields are
its options and have the names of fields of `config.algorithm`. To add an
algorithm, add a module and a line of REGISTRY, or name an importable module of
another project. A module may also define

    PRESETS: variant -> {config field: value}. The algorithm's own name holds
      the options that `--config=...:NAME` sets. 'reference_code' holds the
      options that reproduce GiGPO's released code; omit it if that code lacks
      the algorithm.
    conflicts(config): yields a line for each option of the config that the
      algorithm does not support.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import ml_collections
import numpy as np
from jaxtyping import Bool, Float

import envs
from gigpo_jax import advantages as advantages_lib
from gigpo_jax import batch, deprecated, plugins
from gigpo_jax import options as options_lib
from gigpo_jax.runtime import errors

# name: module that holds `Algorithm`.
REGISTRY = {
  'a2fm': 'gigpo_jax.algorithms.a2fm',
  'a_star_po': 'gigpo_jax.algorithms.a_star_po',
  'arpo': 'gigpo_jax.algorithms.arpo',
  'dr_grpo': 'gigpo_jax.algorithms.dr_grpo',
  'ecpo': 'gigpo_jax.algorithms.ecpo',
  'g2po': 'gigpo_jax.algorithms.g2po',
  'gagpo': 'gigpo_jax.algorithms.gagpo',
  'gdpo': 'gigpo_jax.algorithms.gdpo',
  'gigpo': 'gigpo_jax.algorithms.gigpo',
  'graphgpo': 'gigpo_jax.algorithms.graphgpo',
  'grpo': 'gigpo_jax.algorithms.grpo',
  'hgpo': 'gigpo_jax.algorithms.hgpo',
  'igpo': 'gigpo_jax.algorithms.igpo',
  'pass_at_k': 'gigpo_jax.algorithms.pass_at_k',
  'pgpo': 'gigpo_jax.algorithms.pgpo',
  'polychromic': 'gigpo_jax.algorithms.polychromic',
  'polychromic_vine': 'gigpo_jax.algorithms.polychromic_vine',
  'ppo': 'gigpo_jax.algorithms.ppo',
  'rebel': 'gigpo_jax.algorithms.rebel',
  'reinforce_pp': 'gigpo_jax.algorithms.reinforce_pp',
  'reinforce_pp_baseline': 'gigpo_jax.algorithms.reinforce_pp_baseline',
  'remax': 'gigpo_jax.algorithms.remax',
  'risk_po': 'gigpo_jax.algorithms.risk_po',
  'rloo': 'gigpo_jax.algorithms.rloo',
  't_spmo': 'gigpo_jax.algorithms.t_spmo',
  'tree_grpo': 'gigpo_jax.algorithms.tree_grpo',
  'vineppo': 'gigpo_jax.algorithms.vineppo',
}


class AlgorithmOutput(NamedTuple):
  """Advantages and their metrics.

  Attributes:
    advantages: one advantage per row or per completion token; 0 for padding.
    metrics: metrics by name.
    value_targets: regression targets of the critic; None without a critic.
    value_mask: True at the positions to which the targets apply; None for all
      tokens.
    components: components of the advantages; None if there are none.
  """

  advantages: Float[np.ndarray, ' R'] | Float[np.ndarray, 'R C']
  metrics: dict[str, float]
  value_targets: Float[np.ndarray, 'R C'] | None = None
  value_mask: Bool[np.ndarray, 'R C'] | None = None
  components: advantages_lib.Components | None = None

  links = deprecated.attribute('Credit.links', 'value_mask')
  parts = deprecated.attribute('AlgorithmOutput.parts', 'components')


def make_output(
  advantages: Float[np.ndarray, ' R'],
  rows: batch.Rows,
  metrics: Mapping[str, float] | None = None,
) -> AlgorithmOutput:
  """Returns one advantage per row with their mean absolute value.

  Args:
    advantages: one per row; 0 for padding.
    rows: the rows.
    metrics: further metrics.
  """
  mean = float(np.abs(advantages[rows.real]).mean())
  values = {'advantage/abs_mean': mean, **(metrics or {})}
  return AlgorithmOutput(advantages.astype(np.float32), values)


class Algorithm(Protocol):
  """Computes the advantages of rows.

  Attributes:
    needs_values: whether it requires a critic's values.
    needs_group: whether it compares episodes of a task, and so requires at
      least two per group.

  An algorithm may also have an attribute `continuations`, the number of
  episodes to play from each state. Their mean return is `Rows.state_values`.
  With an attribute `greedy_start` of True, one greedy episode is played from
  the start of each task instead, and the first row of an episode has its value.
  With an attribute `scores_answers` of True, `Rows.state_values` is the
  probability of the task's reference answer before the turn; see
  `answer_scores`.
  With a method `branch_order` and an attribute `root_share`, groups grow by
  branches, which repeat the first turns of other episodes; see `branching`.
  With an attribute `is_stateful` of True, `compute_advantages` has an argument
  `state`, which is {} at first. The metrics 'state/...' of its output are the
  state of the next iteration, and checkpoints save them.
  `reads_success` must be True if it reads `Rows.success`; see
  `plugins.reads_success`. `reads_prefixes` must be True if it reads
  `Rows.prefixes`. An attribute `unused` has the names of the options that it
  inherits and ignores, or that its other options switch off.
  """

  needs_values: bool
  needs_group: bool

  def compute_advantages(self, rows: batch.Rows) -> AlgorithmOutput:
    """Returns the advantages of rows.

    With `needs_values`, a second argument holds the critic's values, [R, C].
    """


def make(name: str, **options: object) -> Algorithm:
  """Creates an algorithm.

  Args:
    name: a key of REGISTRY, or an importable module with a class `Algorithm`.
    **options: its options.

  Raises:
    ValueError: in one line, if the name is unknown, or the algorithm does not
      have an option or rejects it.
  """
  options_lib.refuse_unknown(_class(name), options, field=name)
  return of_section({'name': name, **options})


def of_section(section: Mapping[str, object]) -> Algorithm:
  """Creates the algorithm of a config's section `algorithm`.

  Args:
    section: `name`, see `make`, and options of any algorithm; those that this
      algorithm does not have are ignored.

  Raises:
    ValueError: if the name is unknown or the algorithm rejects an option.
  """
  name = section['name']
  return options_lib.make(
    _class(name),
    section,
    field=f'algorithm.name={name}',
    needs=('needs_values', 'needs_group', 'compute_advantages'),
  )


def _class(name: str) -> type:
  module = _module(name)
  if not isinstance(getattr(module, 'Algorithm', None), type):
    raise ValueError(
      f'algorithm.name={name}: the module has no class Algorithm; it must '
      'define one'
    )
  for old, new in _OLD_METHODS.items():
    _accept_old_method(module.Algorithm, old, new)
  return module.Algorithm


def num_continuations(algorithm: Algorithm) -> int:
  """Returns how many episodes an algorithm needs from each state; 0: none."""
  return getattr(algorithm, 'continuations', int(has_greedy_start(algorithm)))


def compute(
  algorithm: Algorithm,
  rows: batch.Rows,
  values: Float[np.ndarray, 'R C'] | None,
  state: Mapping[str, float],
) -> AlgorithmOutput:
  """Returns the advantages of rows, given the state of a stateful algorithm."""
  further = {'state': state} if getattr(algorithm, 'is_stateful', False) else {}
  if algorithm.needs_values:
    further['values'] = values
  with errors.show_traceback('algorithm.name'):
    output = algorithm.compute_advantages(rows, **further)
  if not isinstance(output, AlgorithmOutput):
    raise ValueError(
      f'algorithm.name: returned {type(output).__name__}; must be '
      'algorithms.AlgorithmOutput'
    )
  plugins.check_values('algorithm.name', output.advantages, rows)
  plugins.check_metrics('algorithm.name', output.metrics)
  return output._replace(advantages=np.asarray(output.advantages))


def next_state(
  state: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
  """Returns the state after an iteration with these metrics.

  Values are Python floats, as a resumed run reads them.
  """
  changes = {k: float(v) for k, v in metrics.items() if k.startswith('state/')}
  return dict(state) | changes


def branches(algorithm: Algorithm) -> bool:
  """Returns whether groups of an algorithm grow by branches."""
  return hasattr(algorithm, 'branch_order')


def num_roots(algorithm: Algorithm, members: int) -> int:
  """Returns how many of the episodes of a group start with the group."""
  if not branches(algorithm):
    return members
  return max(1, round(algorithm.root_share * members))


def scores_answers(algorithm: Algorithm) -> bool:
  """Returns whether an algorithm needs probabilities of reference answers."""
  return getattr(algorithm, 'scores_answers', False)


def replays(algorithm: Algorithm) -> bool:
  """Returns whether an algorithm replays the first turns of episodes."""
  return num_continuations(algorithm) > 0 or branches(algorithm)


def uses_free_policy(algorithm: Algorithm) -> bool:
  """Returns whether an algorithm needs prompts without forced prefixes."""
  return replays(algorithm) or scores_answers(algorithm)


def reads_prefixes(algorithm: Algorithm) -> bool:
  """Returns whether an algorithm reads with which prefix responses begin."""
  return getattr(algorithm, 'reads_prefixes', False)


def invalid_penalty(algorithm: Algorithm) -> float:
  """Returns what an algorithm subtracts from invalid responses' rewards."""
  if 'invalid_penalty' in getattr(algorithm, 'unused', ()):
    return 0.0
  return getattr(algorithm, 'invalid_penalty', 0.0)


def has_greedy_start(algorithm: Algorithm) -> bool:
  """Returns whether an algorithm needs a greedy episode of each task."""
  return getattr(algorithm, 'greedy_start', False)


def _module(name: str) -> types.ModuleType:
  return envs.named_module('algorithm.name', name, REGISTRY)


def conflicts(config: ml_collections.ConfigDict) -> Iterator[str]:
  """Yields a line for each option that the config's algorithm rejects."""
  name = config.algorithm.name
  yield from envs.own_lines(
    _module(name), 'conflicts', config, f'algorithm.name={name}'
  )


def problems(values: Mapping[str, object]) -> Iterator[str]:
  """Yields one line for each option of any algorithm with a wrong value.

  Args:
    values: options by name, of `config.algorithm`.
  """
  # Several algorithms may have an option; the line is that of the chosen one.
  modules = dict.fromkeys([values.get('name'), *REGISTRY])
  lines: dict[str, str] = {}
  for name in modules:
    try:
      algorithm = _module(name).Algorithm
    except (AttributeError, ValueError):
      continue  # `make` reports it.
    for line in options_lib.problems(algorithm, values):
      lines.setdefault(line.partition('=')[0], line)
  yield from lines.values()


def old_method(old: str, new: str) -> Callable:
  """Returns a method that is the deprecated alias of another.

  Args:
    old: name of the returned method.
    new: name of the method that it calls.
  """

  def call(self: Algorithm, rows: batch.Rows, *values):
    deprecated.warn(f'Algorithm.{old}', new)
    # Methods without a critic's values accepted them, too.
    args = (rows, *values) if self.needs_values else (rows,)
    for owner in type(self).__mro__:
      method = vars(owner).get(new)
      # An override under the old name may call the method that it overrides.
      if method and method is not vars(owner).get(old):
        return method(self, *args)
    raise AttributeError(new)

  return call


# Deprecated alias of `compute_advantages`.
credit = old_method('credit', 'compute_advantages')


_OLD_METHODS = {'credit': 'compute_advantages', 'parts': 'components'}


def _accept_old_method(algorithm: type, old: str, new: str) -> None:
  """Accepts a class that overrides a method under its old name."""
  for owner in algorithm.__mro__:
    if new in vars(owner):
      return
    if old in vars(owner):
      deprecated.warn(f'{owner.__module__}.Algorithm.{old}', new)
      setattr(owner, new, getattr(owner, old))
      return


__getattr__ = deprecated.names(
  __name__,
  {'Credit': 'AlgorithmOutput', 'NAMES': 'REGISTRY'},
  {'Credit': {'links': 'value_mask', 'parts': 'components'}},
)
