"""The table of methods and options: docs/methods.md.

Algorithms, modulators and selectors are read from their registries: the first
line of a module's docstring has the paper, that of its class the formula.
Results are read from docs/results. `python -m gigpo_jax.algorithms` prints the
page.
"""

import csv
import dataclasses
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from gigpo_jax import algorithms, modulators, selectors
from gigpo_jax.tools import plots

PROJECT = pathlib.Path(__file__).parents[2]
# Tables of docs/results, by falling precedence, and the columns of the page.
_EXPERIMENTS = {'alfworld': 'ALFWorld', 'webshop': 'WebShop'}
_NONE = '–'


@dataclasses.dataclass(frozen=True)
class Family:
  """A registry of plug-ins.

  Attributes:
    registry: module of each plug-in, by name.
    class_name: the class whose docstring has the formula.
    text: what the page says about all of them.
  """

  registry: Mapping[str, str]
  class_name: str
  text: str


FAMILIES = {
  'Algorithms': Family(
    algorithms.REGISTRY,
    'Algorithm',
    'At most one, with its options in `algorithm`. Files: '
    '`gigpo_jax/algorithms/NAME.py`; golden values: `tests/algorithms_test.py`',
  ),
  'Modulators': Family(
    modulators.REGISTRY,
    'Modulator',
    'A chain, `algorithm.modulators`, with options in `algorithm`. Files: '
    '`gigpo_jax/modulators/NAME.py`; golden values: `tests/modulators_test.py`',
  ),
  'Selectors': Family(
    selectors.REGISTRY,
    'Selector',
    'A chain, `filter.select`, with options in `filter`. Files: '
    '`gigpo_jax/selectors/NAME.py`; golden values: `tests/selectors_test.py`',
  ),
}


class Option(NamedTuple):
  """An option of the config, as a row of the page."""

  field: str
  paper: str
  formula: str
  cost: str = 'none'


_REFERENCE = 'reference pass'
# Title: (files and golden values, options).
OPTIONS = {
  'Loss': (
    '`gigpo_jax/losses.py`, `gigpo_jax/row_regression.py`, '
    '`gigpo_jax/entropy_band.py`, `gigpo_jax/kl.py`; golden values: '
    '`tests/losses_test.py`, `tests/torch_losses_test.py`',
    (
      Option('loss.ratio_level=row', '2507.18071', 'GSPO-token, Turn-PPO'),
      Option('loss.surrogate=cispo', '2506.13585', '-sg(clip(ratio)) A log pi'),
      Option(
        'loss.name=row_regression',
        '2505.20686',
        '(weight log(pi / other) - A)^2 of a row; ref or old',
        _REFERENCE,
      ),
      Option(
        'loss.clip_epsilon_high', '2503.14476', 'clip(ratio, 1 - low, 1 + high)'
      ),
      Option('loss.dual_clip', '1912.09729', 'min(loss, -c A) for A < 0'),
      Option(
        'loss.aggregation',
        '2503.20783',
        'token_mean, sequence_mean, sequence_sum, fixed_length',
      ),
      Option('loss.kl_weight', _NONE, '+ weight KL', _REFERENCE),
      Option(
        'loss.kl_estimator', _NONE, 'k2, k3 or abs of log(ref / pi)', 'none'
      ),
      Option(
        'loss.kl_target',
        '1909.08593',
        'weight (1 + clip(KL / target - 1, -.2, .2) n / horizon)',
      ),
      Option('loss.entropy_weight', _NONE, '- weight H'),
      Option(
        'loss.entropy_band.weight',
        '2509.22576',
        'EPO: + weight distance of H from a band around its past mean',
      ),
      Option(
        'loss.tis_clip',
        '2110.00641',
        'A min(learner / sampler, c)',
        "the learner's log-probs",
      ),
      Option('loss.tis_level=row', _NONE, 'product of ratios over a row'),
    ),
  ),
  'Rewards': (
    '`gigpo_jax/reward_shaping.py`, `gigpo_jax/reward_functions.py`; golden '
    'values: `tests/reward_shaping_test.py`, `tests/reward_functions_test.py`',
    (
      Option('reward.kl_weight', '2501.03262', 'r - weight KL', _REFERENCE),
      Option(
        'reward.kl_estimator',
        _NONE,
        'sum over tokens of k1, k2, k3 or abs of log(ref / pi)',
      ),
      Option(
        'reward.overlong_buffer',
        '2503.14476',
        'r - penalty clip(1 - (limit - length) / buffer, 0, 1)',
      ),
      Option(
        'reward.functions',
        _NONE,
        'environment_weight r + sum of w_k f_k(episode)',
        'worker processes',
      ),
    ),
  ),
  'Teacher': (
    '`gigpo_jax/teacher.py`, `gigpo_jax/replay.py`, '
    '`gigpo_jax/privileged.py`; golden values: `tests/teacher_test.py`, '
    '`tests/privileged_test.py`',
    (
      Option(
        'teacher.mu_peak',
        '2508.11408',
        '(1 - mu) L_RL + mu L_teacher; mu: warm-up, then half a cosine',
        "the teacher's rows",
      ),
      Option(
        'teacher.loss',
        '2601.18734',
        '-log p, or the surrogate; distillation: A = log(p_solved / p)',
        'a forward pass',
      ),
      Option(
        'teacher.token_weight', '2508.11408', 'sg(p (1 - p)) per token of L_SFT'
      ),
    ),
  ),
  'Pairs': (
    '`gigpo_jax/preference.py`, `gigpo_jax/sft.py` (`launch/sft.py`); golden '
    'values: `tests/preference_test.py`',
    (
      Option(
        'sft.loss=dpo',
        '2501.01821',
        '-log sigmoid(beta (log-ratios of better - of worse turns))',
        'a forward pass',
      ),
      Option(
        'sft.segment_turns', '2501.01821', 'turns of each episode of a pair'
      ),
    ),
  ),
  'Updates': (
    '`gigpo_jax/optimizer.py`, `gigpo_jax/learner.py`; golden values: '
    '`tests/optimizer_test.py`, `tests/torch_losses_test.py`, '
    '`tests/learner_test.py`',
    (
      Option(
        'learner.epochs', '1707.06347', 'passes over the rows', 'more updates'
      ),
      Option(
        'optimizer.decay', _NONE, 'final + (1 - final) (1 + cos(pi t)) / 2'
      ),
      Option('optimizer.warmup_ratio', _NONE, 'share of decay_updates'),
      Option('optimizer.eps', '1412.6980', 'm / (sqrt(v) + eps)'),
      Option('optimizer.no_decay', _NONE, 'parameters without weight decay'),
    ),
  ),
  'Tasks, groups and evaluation': (
    '`gigpo_jax/group_filter.py`, `gigpo_jax/tasks.py`, '
    '`gigpo_jax/forced_prefixes.py`, `gigpo_jax/evaluation.py`; golden values '
    'in the tests of the same names',
    (
      Option(
        'filter.drop_zero_variance',
        '2503.14476',
        'replace groups of equal rewards',
        'more episodes',
      ),
      Option('rollout.horizon', '2509.08755', 'limit of turns by iteration'),
      Option(
        'rollout.forced_members',
        '2510.12838',
        'members whose responses begin with each of rollout.prefixes',
      ),
      Option('tasks.draw=uncertain', _NONE, 'chance of a task ~ p (1 - p)'),
      Option(
        'tasks.diversity_weight',
        '2509.21268',
        'VAS: chance of a task ~ (1 - w) p (1 - p) + w diversity',
      ),
      Option('tasks.draw=stages', '2508.11360', 'task types by iteration'),
      Option(
        'evaluation.repeats',
        '2107.03374',
        'pass@k = 1 - C(failures, k) / C(n, k)',
        'more episodes',
      ),
    ),
  ),
}

_INTRODUCTION = (
  'This page lists all methods and options. `python -m gigpo_jax.algorithms` '
  'generates it from the docstrings, the registries and `docs/results`; a test '
  'compares them.',
  'A method in the first column is a word after the colon, as in '
  '`--config=configs/alfworld.py:mini,hgpo,dgpo,snr`. The cost is what a '
  'method computes in addition to GRPO. Entropies, logits and '
  '`feature_squares`, the squared norm of the last hidden state, come from the '
  'forward pass of the old log-probs, which `loss.old_log_probs=sampler` '
  'otherwise saves.',
  'ALFWorld and WebShop: final success in % on unseen tasks in `:mini`, mean ± '
  'standard error over seeds, measured: at least three seeds and 500 tasks, or '
  'the five seeds of an earlier table on 128; see [Results](results.md). – '
  'means implemented, not measured. No option below the selectors is measured '
  'alone.',
  'Symbols: E return of an episode, G discounted return from a step, A_E and '
  'A_S episode and step advantage, H entropy, p share of successes, sg no '
  'gradient. The docstrings define the others.',
  'Of ST-PPO (2511.20718), only the ratios of turns are there, as '
  '`loss.ratio_level=row`. Its clipping-triggered normalisation divides the '
  'gradient by the norm of a term of the clipped tokens. The equations could '
  'not be read, and public summaries of them contradict each other.',
)


def page() -> str:
  """Returns the text of docs/methods.md."""
  parts = ['# Methods', *map(_paragraph, _INTRODUCTION)]
  columns = ['config', 'paper', 'formula', 'cost', *_EXPERIMENTS.values()]
  for title, family in FAMILIES.items():
    rows = [_plugin_row(family, name) for name in family.registry]
    parts += [f'## {title}', _paragraph(f'{family.text}.')]
    parts.append(plots.table(columns, rows))
  for title, (files, options) in OPTIONS.items():
    rows = [(f'`{field}`', *others) for field, *others in options]
    parts += [f'## {title}', _paragraph(f'Files: {files}.')]
    parts.append(plots.table(columns[:4], rows))
  return '\n\n'.join(parts) + '\n'


def config_fields() -> Iterator[str]:
  """Yields the fields of the config that the page names."""
  for _, options in OPTIONS.values():
    yield from (option.field.partition('=')[0] for option in options)


def _paragraph(text: str) -> str:
  return textwrap.fill(text, 120, break_on_hyphens=False)


def _plugin_row(family: Family, name: str) -> list[str]:
  module = importlib.import_module(family.registry[name])
  plugin = getattr(module, family.class_name)
  paper = re.search(r'arXiv:([\d.]+\d)', _first_line(module))
  formula = _first_line(plugin).rstrip('.').replace('|', '\\|')
  return [
    f'`{name}`',
    paper[1] if paper else _NONE,
    formula,
    _cost(plugin),
    *(_measured(name, experiment) for experiment in _EXPERIMENTS),
  ]


def _first_line(documented: object) -> str:
  return inspect.getdoc(documented).partition('\n')[0]


def _cost(plugin: type) -> str:
  costs = []
  if getattr(plugin, 'needs_values', False):
    costs.append('a critic')
  if 'continuations' in {f.name for f in dataclasses.fields(plugin)}:
    costs.append('more episodes')
  if hasattr(plugin, 'branch_order'):
    costs.append('replayed turns')
  if getattr(plugin, 'greedy_start', False):
    costs.append('an episode per group')
  if getattr(plugin, 'scores_answers', False):
    costs.append('a pass over the prompts')
  for need in getattr(plugin, 'needs', ()):
    if need != 'log_probs':
      costs.append({'prompt_log_probs': 'prompt logits'}.get(need, need))
  logits = [cost for cost in costs if '@' in cost]
  costs = [cost for cost in costs if cost not in logits]
  costs += [f'{len(logits)} more logits'] if logits else []
  return ', '.join(costs) or 'none'


def _measured(name: str, experiment: str) -> str:
  """Returns the final success of the runs with a name, over seeds."""
  rates = _tests(name, experiment) or _last_evaluations(name, experiment)
  if len(rates) < 2:
    return _NONE
  error = np.std(rates, ddof=1) / len(rates) ** 0.5
  return f'{100 * np.mean(rates):.1f} ± {100 * error:.1f}'


def _tests(name: str, experiment: str) -> list[float]:
  """Returns the success in the tests of the credit benchmark, by seed."""
  lines = _lines('credit_tests', name, experiment)
  return [float(line['success']) for line in lines]


def _last_evaluations(name: str, experiment: str) -> list[float]:
  """Returns the success in the last evaluations of the main runs, by seed."""
  final: dict[str, tuple[int, float]] = {}
  for line in _lines('main', name, experiment):
    value = int(line['iteration']), float(line['eval/success_rate'])
    final[line['seed']] = max(value, final.get(line['seed'], value))
  return [rate for _, rate in final.values()]


def _lines(table: str, name: str, experiment: str) -> list[dict[str, str]]:
  """Returns the lines of a table of results about the runs with a name."""
  path = PROJECT / 'docs' / 'results' / f'{table}.csv'
  if not path.is_file():
    return []
  with path.open(newline='', encoding='utf-8') as file:
    return [
      line
      for line in csv.DictReader(file)
      if (line['name'], line['experiment']) == (name, experiment)
    ]
