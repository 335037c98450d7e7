"""The table of methods and options: docs/methods.md.

Algorithms, modulators and selectors are read from their registries: the first
line of a module's docstring has the paper, that of its class the formula. The
section `Attributes` of the class explains its options. Results are read from
docs/results. `python -m gigpo_jax.algorithms` prints the page.
"""

import dataclasses
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gigpo_jax import algorithms, modulators, options, selectors
from gigpo_jax import config as config_lib
from gigpo_jax.tools import outcomes, plots, sweep_table

PROJECT = pathlib.Path(__file__).parents[2]
# Experiments of docs/results, and their columns of the page.
_EXPERIMENTS = {'alfworld': 'ALFWorld', 'webshop': 'WebShop'}
_LEAST_SEEDS = 3  # Fewer are not shown.
_NONE = '–'


@dataclasses.dataclass(frozen=True)
class Family:
  """A registry of plug-ins.

  Attributes:
    registry: module of each plug-in, by name.
    class_name: the class whose docstring has the formula.
    section: section of the config that has their options.
    text: what the page says about all of them.
  """

  registry: Mapping[str, str]
  class_name: str
  section: str
  text: str

  def plugins(self) -> dict[str, type]:
    """Returns the class of each plug-in, by name."""
    return {
      name: pkgutil.resolve_name(f'{module}:{self.class_name}')
      for name, module in self.registry.items()
    }


FAMILIES = {
  'Algorithms': Family(
    algorithms.REGISTRY,
    'Algorithm',
    'algorithm',
    'At most one, with its options in `algorithm`. Files: '
    '`gigpo_jax/algorithms/NAME.py`; golden values: `tests/algorithms_test.py`',
  ),
  'Modulators': Family(
    modulators.REGISTRY,
    'Modulator',
    'algorithm',
    'A chain, `algorithm.modulators`, with options in `algorithm`. Files: '
    '`gigpo_jax/modulators/NAME.py`; golden values: `tests/modulators_test.py`',
  ),
  'Selectors': Family(
    selectors.REGISTRY,
    'Selector',
    'filter',
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


# Title: sections of the config whose own options the page explains.
_SECTIONS = {
  'Algorithms': ('algorithm',),
  'Loss': ('loss', 'loss.entropy_band'),
  'Tasks, groups and evaluation': ('filter',),
}
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
        'weight (1 + clip(KL / target - 1, -.2, .2) min(n / horizon, 1))',
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
    '`gigpo_jax/reward_shaping.py`, `gigpo_jax/reward_functions.py`, '
    '`gigpo_jax/scored_rewards.py`; golden values: '
    '`tests/reward_shaping_test.py`, `tests/reward_functions_test.py`, '
    '`tests/scored_rewards_test.py`',
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
      Option(
        'reward.scored',
        _NONE,
        'r + sum of w_k f_k(exp(mean log p) of texts of f_k)',
        'a forward pass each',
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
        '-log p, or the surrogate; self-distillation: A = log(p_solved / p)',
        'a forward pass',
      ),
      Option(
        'teacher.token_weight', '2508.11408', '-sg(p (1 - p)) log p, or -log p'
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
        'optimizer.decay',
        _NONE,
        'final + (1 - final) x, x = 1 - t, or (1 + cos(pi t)) / 2',
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
      Option(
        'tasks.draw=uncertain',
        _NONE,
        'chance of a task: uniform / n + (1 - uniform) x, x ~ p (1 - p)',
      ),
      Option(
        'tasks.diversity_weight',
        '2509.21268',
        'VAS: x ~ (1 - w) p (1 - p) + w diversity',
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
  'The columns ALFWorld and WebShop are the measured final success in % on '
  'unseen tasks in `:mini`, mean ± standard error over seeds: at least three '
  'seeds and 500 tasks, or five seeds and 128 tasks of an earlier table. Means '
  'of different numbers of seeds are not comparable; [Results](results.md) '
  'compares the methods in pairs. – means implemented, not measured. Of the '
  'options below the selectors, only [teachers](results.md#teachers) are '
  'measured alone.',
  'Symbols: E return of an episode, G discounted return from a step, A_E and '
  'A_S episode and step advantage, H entropy, p share of successes, sg no '
  'gradient. The docstrings define the others.',
  'The lists of options show their defaults. `--config.FIELD=VALUE` sets an '
  'option.',
  'Of ST-PPO (2511.20718), only the ratios of turns are implemented, as '
  '`loss.ratio_level=row`; its clipping-triggered normalization is not.',
)


def page() -> str:
  """Returns the text of docs/methods.md."""
  parts = ['# Methods', *map(_paragraph, _INTRODUCTION)]
  columns = ['config', 'paper', 'formula', 'cost', *_EXPERIMENTS.values()]
  for title, family in FAMILIES.items():
    rows = [_plugin_row(name, p) for name, p in family.plugins().items()]
    parts += [f'## {title}', _paragraph(f'{family.text}.')]
    parts += [plots.table(columns, rows), '### Options']
    parts += [*_shared_options(title), *_method_options(family)]
  for title, (files, fields) in OPTIONS.items():
    rows = [(f'`{field}`', *others) for field, *others in fields]
    parts += [f'## {title}', _paragraph(f'Files: {files}.')]
    parts.append(plots.table(columns[:4], rows))
    shared = [*_shared_options(title)]
    parts += ['### Options', *shared] if shared else []
  return '\n\n'.join(parts) + '\n'


def config_fields() -> Iterator[str]:
  """Yields the fields of the config that the page names."""
  for _, fields in OPTIONS.values():
    yield from (option.field.partition('=')[0] for option in fields)


def _shared_options(title: str) -> Iterator[str]:
  """Yields the options of the sections of a title that are no plug-in's."""
  for section in _SECTIONS.get(title, ()):
    for path in config_lib.SECTIONS[section]:
      owner = pkgutil.resolve_name(path)
      yield _paragraph(_first_line(owner))
      yield _bullets(_option_lines(section, owner, options.defaults(owner)))


def _method_options(family: Family) -> Iterator[str]:
  """Yields the options of each method, and what its variant sets."""
  names = {plugin: name for name, plugin in family.plugins().items()}
  for plugin, name in names.items():
    parent = next((p for p in plugin.__mro__[1:] if p in names), None)
    own, inherited = options.defaults(plugin), options.defaults(parent)
    lines = _option_lines(
      family.section,
      plugin,
      {o: v for o, v in own.items() if (o, v) not in inherited.items()},
    )
    module = importlib.import_module(plugin.__module__)
    preset = getattr(module, 'PRESETS', {}).get(name)
    if preset:
      fields = ', '.join(f'`{f}={value}`' for f, value in preset.items())
      lines.append(f'The variant `:{name}` sets {fields}.')
    title = f'**`{name}`**'
    if parent:
      fixed = ', '.join(f'`{o}`' for o in inherited if o not in own)
      title += f': the options of `{names[parent]}`'
      title += f' except {fixed}' if fixed else ''
    if lines or parent:
      yield _paragraph(title)
    if lines:
      yield _bullets(lines)


def _option_lines(
  section: str, owner: type, defaults: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each of some options of a dataclass."""
  texts = explanations(owner)
  return [
    f'`{section}.{option}={value}`: {texts[option]}'
    for option, value in defaults.items()
    if not dataclasses.is_dataclass(value)  # A section of its own.
  ]


def explanations(owner: type) -> dict[str, str]:
  """Returns what docstrings of a class and its bases say on its attributes."""
  texts = {}
  for part in reversed(owner.__mro__):
    section = inspect.cleandoc(part.__doc__ or '').partition('Attributes:\n')[2]
    for name, text in re.findall(
      r'^  (\w+): (.*(?:\n    .*)*)', section, re.MULTILINE
    ):
      texts[name] = ' '.join(text.split())
  return texts


def _paragraph(text: str, **kwargs: str) -> str:
  return textwrap.fill(text, 120, break_on_hyphens=False, **kwargs)


def _bullets(lines: Iterable[str]) -> str:
  return '\n'.join(_paragraph(f'- {x}', subsequent_indent='  ') for x in lines)


def _plugin_row(name: str, plugin: type) -> list[str]:
  module = importlib.import_module(plugin.__module__)
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
  folder = PROJECT / 'docs' / 'results'
  tests = _tests(folder).get(experiment, {}).get(name, {})
  rates = [result.success for result in tests.values()]
  rates = rates or _last_evaluations(folder).get((experiment, name), [])
  if len(rates) < _LEAST_SEEDS:
    return _NONE
  error = np.std(rates, ddof=1) / len(rates) ** 0.5
  return f'{100 * np.mean(rates):.1f} ± {100 * error:.1f}'


@functools.cache
def _tests(folder: pathlib.Path) -> dict[str, outcomes.Results]:
  """Returns the tests of the credit benchmark by experiment, name and seed."""
  return outcomes.group(sweep_table.read_tests(folder / 'credit.csv'))


@functools.cache
def _last_evaluations(
  folder: pathlib.Path,
) -> dict[tuple[str, str], list[float]]:
  """Returns the success in the last evaluations of the main runs.

  The keys are experiments and names; the values have a number for each seed.
  """
  rates = {}
  rows = sweep_table.read(folder / 'main.csv', missing_ok=True)
  for (experiment, name, _), curve in sweep_table.by_run(rows).items():
    rate = curve[-1]['eval/success_rate']
    rates.setdefault((experiment, name), []).append(rate)
  return rates
