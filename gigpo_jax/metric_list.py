"""Every metric that a run writes: its unit and its meaning.

    python -m gigpo_jax.metric_list

writes docs/metrics.md from the table below; tests compare the page with it,
and it with what runs write and with the names in the code.
"""

import dataclasses
import pathlib
import re

_PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'metrics.md'


@dataclasses.dataclass(frozen=True)
class Metric:
  """One metric, or a family of them.

  Attributes:
    name: `<...>` in it stands for any text.
    unit: `share` is a number in [0, 1]; '1' has no unit.
    meaning: in a sentence without a verb.
  """

  name: str
  unit: str
  meaning: str

  def matches(self, name: str) -> bool:
    """Returns whether the name is this metric's, or of this family."""
    parts = re.split(r'<[a-z_]+>', self.name)
    return bool(re.fullmatch('.+'.join(map(re.escape, parts)), name))


@dataclasses.dataclass(frozen=True)
class Section:
  """Metrics that belong together.

  Attributes:
    title: heading on the page.
    text: what holds for all of them.
    prefixes: that every name is written with, each in turn.
    metrics: their names come without the prefix.
  """

  title: str
  text: str
  prefixes: tuple[str, ...]
  metrics: tuple[Metric, ...]


SECTIONS = (
  Section(
    'Episodes',
    '`train/` is of the episodes of the iteration, groups that a filter drops '
    'included; `eval/` of those on the evaluation tasks, before the '
    "iteration's update. An episode that its environment broke off counts as "
    'not successful, with score 0.',
    ('train/', 'eval/'),
    (
      Metric('success_rate', 'share', 'successful episodes'),
      Metric(
        'success_rate/<type>', 'share', 'successful episodes of a task type'
      ),
      Metric(
        'score',
        'share',
        'mean score; only where the environment reports scores',
      ),
      Metric(
        'episode_reward',
        'reward',
        'mean sum of raw rewards, before any penalty',
      ),
      Metric('episode_length', 'steps', 'mean number of steps'),
      Metric('invalid_action_rate', 'share', 'steps with an invalid response'),
      Metric('truncated_rate', 'share', 'responses cut off at the token limit'),
      Metric('response_tokens', 'tokens', 'mean length of a response'),
      Metric('response_tokens_max', 'tokens', 'longest response'),
      Metric('prompt_tokens', 'tokens', 'mean length of a prompt'),
      Metric(
        'shortened_prompts',
        'steps',
        'prompts that were over the limit and lost history or text',
      ),
      Metric(
        'failed_episodes', 'episodes', 'episodes that the environment broke off'
      ),
      Metric(
        'failed_episodes/<cause>',
        'episodes',
        'those by cause: raised, garbage, died, hung, differed, neighbours',
      ),
      Metric(
        'inadmissible_action_rate',
        'share',
        'steps whose action was not among the admissible ones (ALFWorld, '
        'WebShop, TextWorld)',
      ),
      Metric(
        'webshop_score', 'share', 'mean score of finished episodes (WebShop)'
      ),
      Metric('search_rate', 'share', 'steps that searched (search QA)'),
      Metric(
        'blocked_action_rate', 'share', 'steps that moved nothing (Sokoban)'
      ),
      Metric('room', '1', 'mean number of the room (the toy environment)'),
    ),
  ),
  Section(
    'Evaluation',
    'Only of iterations that evaluate, `evaluation.every`.',
    ('eval/',),
    (
      Metric(
        'success_low', 'share', 'lower end of the 95 % interval of success_rate'
      ),
      Metric('success_high', 'share', 'upper end of that interval'),
      Metric(
        'score_low',
        'share',
        'lower end of the 95 % bootstrap interval of score',
      ),
      Metric('score_high', 'share', 'upper end of that interval'),
      Metric('episodes', 'episodes', 'episodes that were evaluated'),
    ),
  ),
  Section(
    'Advantages',
    'What the algorithm gives to rows (steps) and tokens. Metrics of anchor '
    'groups are written for every algorithm, as GiGPO would see its rows.',
    ('advantage/',),
    (
      Metric(
        'groups_without_spread',
        'share',
        'groups whose episodes all have the same episode advantage, 0',
      ),
      Metric(
        'singleton_anchor_rows',
        'share',
        'rows whose anchor group has no other row',
      ),
      Metric('anchor_group_size_mean', 'rows', 'mean size of an anchor group'),
      Metric('anchor_groups_of_1', 'share', 'anchor groups of one row'),
      Metric('anchor_groups_of_2_to_3', 'share', 'anchor groups of 2 or 3'),
      Metric('anchor_groups_of_4_to_7', 'share', 'anchor groups of 4 to 7'),
      Metric('anchor_groups_of_8_and_more', 'share', 'anchor groups of 8 on'),
      Metric('episode_abs_mean', '1', 'mean of |episode advantage|'),
      Metric('step_abs_mean', '1', 'mean of |step advantage|'),
      Metric('episode_std', '1', 'standard deviation of episode advantages'),
      Metric('step_std', '1', 'standard deviation of step advantages'),
      Metric(
        'correlation',
        '1',
        'correlation of episode and step advantages; absent where either is '
        'constant',
      ),
      Metric(
        'abs_mean',
        '1',
        'mean of |advantage| (PPO, GDPO, REINFORCE++)',
      ),
      Metric('std', '1', 'standard deviation of the advantage over tokens'),
      Metric('trained_share', 'share', 'tokens whose advantage is not 0'),
      Metric(
        'effective_tokens',
        'tokens',
        '(sum of |A|)^2 / (sum of A^2) over tokens',
      ),
    ),
  ),
  Section(
    'Groups trained on',
    'Only with a filter, `filter.*`.',
    ('filter/',),
    (
      Metric('refills', '1', 'further times that groups were played'),
      Metric('groups_kept', 'groups', 'groups that are trained on'),
      Metric(
        'groups_with_spread_share',
        'share',
        'groups played whose episodes differ in their reward',
      ),
    ),
  ),
  Section(
    'Loss',
    'Means over all trained tokens of the iteration, at the parameters of '
    'each update.',
    ('loss/',),
    (
      Metric('total', '1', 'the loss'),
      Metric(
        'policy', '1', 'clipped surrogate, the part without entropy and KL'
      ),
      Metric('entropy', 'nats', "entropy of the policy's next token"),
      Metric(
        'entropy_outside',
        'nats',
        'weighted distance of the entropy from its corridor; only with one',
      ),
      Metric(
        'kl',
        'nats',
        'k3 estimate of the KL to the reference policy; only with '
        '`loss.kl_weight`',
      ),
    ),
  ),
  Section(
    'Probability ratios',
    'Of the policy in the update to the policy before it; over trained tokens. '
    'With `loss.ratio_level=row` the ratio is that of the row.',
    ('ratio/',),
    (
      Metric('mean', '1', 'mean ratio'),
      Metric('max', '1', 'largest ratio'),
      Metric('kl', 'nats', 'k3 estimate of the KL from before the update'),
      Metric(
        'clipped_low', 'share', 'tokens clipped below, of negative advantage'
      ),
      Metric(
        'clipped_high', 'share', 'tokens clipped above, of positive advantage'
      ),
      Metric(
        'clipped_dual',
        'share',
        'tokens clipped by `loss.dual_clip`; only with it',
      ),
    ),
  ),
  Section(
    'Updates',
    'Of the optimizer steps of the iteration.',
    ('update/',),
    (
      Metric('count', 'updates', 'optimizer steps, skipped ones included'),
      Metric('tokens', 'tokens', 'trained tokens'),
      Metric('grad_norm', '1', 'mean norm of the gradient before clipping'),
      Metric(
        'skipped', 'updates', 'updates skipped, as loss or gradient not finite'
      ),
      Metric(
        'skipped_in_row', 'updates', 'updates skipped in a row until the end'
      ),
      Metric(
        'most_skipped_in_row', 'updates', 'longest such run in the iteration'
      ),
      Metric('epoch', 'epochs', 'passes over the data (only `launch/sft.py`)'),
    ),
  ),
  Section(
    'Critic',
    'Only of PPO.',
    ('critic/',),
    (
      Metric('loss', '1', 'half the mean squared error of values, clipped'),
      Metric('value_mean', 'reward', 'mean value before the update'),
      Metric(
        'explained', 'share', 'variance of the targets that values explain'
      ),
      Metric('clipped', 'share', 'positions whose value change is clipped'),
      Metric('grad_norm', '1', 'as `update/grad_norm`'),
      Metric('count', 'updates', 'as `update/count`'),
      Metric('skipped', 'updates', 'as `update/skipped`'),
      Metric('skipped_in_row', 'updates', 'as `update/skipped_in_row`'),
      Metric(
        'most_skipped_in_row', 'updates', 'as `update/most_skipped_in_row`'
      ),
    ),
  ),
  Section(
    'Microbatches',
    'How rows are packed for the update and for log-probs.',
    ('packs/',),
    (
      Metric('tokens', 'tokens', 'tokens of all rows that were packed'),
      Metric('padding', 'share', 'padding, of all positions computed'),
      Metric(
        'shared_tokens',
        'tokens',
        'prompt tokens computed once for several rows, without the first',
      ),
    ),
  ),
  Section(
    'Sampler and learner',
    'How the log-probs that the sampler reports differ from those that the '
    'learner computes of the same tokens before the update.',
    ('sampler/',),
    (
      Metric(
        'log_prob_difference_mean', 'nats', 'mean |difference| of a token'
      ),
      Metric('log_prob_difference_max', 'nats', 'largest |difference|'),
      Metric(
        'sequence_ratio_mean',
        '1',
        'mean over rows of the ratio of their probabilities, learner to '
        'sampler',
      ),
      Metric('sequence_ratio_max', '1', 'largest such ratio'),
    ),
  ),
  Section(
    'Rollout',
    'Speed and scheduling of the last rollout of this process.',
    ('rollout/',),
    (
      Metric('prefill_tokens_per_sec', 'tokens/s', 'prompt tokens computed'),
      Metric('decode_tokens_per_sec', 'tokens/s', 'tokens sampled'),
      Metric(
        'slot_occupancy', 'share', "slots' decoding steps that gave a token"
      ),
      Metric(
        'shared_prompt_share',
        'share',
        'prompt tokens that another request had already computed',
      ),
      Metric('prefill_padding_share', 'share', 'padding in prefills'),
      Metric(
        'host_wait_share',
        'share',
        'time, at most, in which the device waited for the host',
      ),
      Metric(
        'env_wait_share',
        'share',
        'time in which the sampler waited for environments',
      ),
      Metric('env_secs_per_step', 's', 'mean time of a step of an environment'),
      Metric('env_restarts', 'processes', 'workers restarted since the start'),
      Metric('env_recycled', 'processes', 'workers renewed as planned'),
      Metric(
        'compilations', 'programs', 'programs that the sampler has compiled'
      ),
    ),
  ),
  Section(
    'Time',
    'Wall time of the parts of the iteration.',
    ('time/',),
    (
      Metric('iteration_secs', 's', 'all of it'),
      Metric('rollout_secs', 's', 'playing the episodes'),
      Metric('update_secs', 's', 'all between rollout and the next one'),
      Metric('rows_secs', 's', 'making rows of episodes'),
      Metric('credit_secs', 's', 'computing advantages'),
      Metric('episodes_secs', 's', 'writing episodes; only if they are kept'),
      Metric('evaluation_secs', 's', 'the evaluation'),
    ),
  ),
  Section(
    'Cost so far',
    'What training has cost since the start of the run, evaluations left out.',
    ('spent/',),
    (
      Metric('episodes', 'episodes', 'episodes played, dropped ones included'),
      Metric('env_steps', 'steps', 'their steps'),
      Metric('tokens', 'tokens', 'tokens sampled for them'),
    ),
  ),
)

_HEAD = """\
# Metrics

Every iteration is a line of `metrics.jsonl` in the work directory,
`{"iteration": n, "NAME": value, ...}`, and a step in `tensorboard/` and, with
`metrics.wandb`, in Weights & Biases. A value that is not finite is `null`.
`rollout/`, `sampler/` and `time/` depend on the machine and its load; all other
metrics are the same each time that a run is repeated or resumed.

An environment adds metrics of its own with `StepResult.metrics`: their means
over the steps that have them are `train/NAME` and `eval/NAME`, or
`train/env_NAME` where the name is taken.

This page is written by `python -m gigpo_jax.metric_list`.
"""


def find(name: str) -> Metric | None:
  """Returns the entry of a metric; None if there is none."""
  for section in SECTIONS:
    for prefix in section.prefixes:
      for metric in section.metrics:
        if name.startswith(prefix) and metric.matches(name[len(prefix) :]):
          return metric
  return None


def page() -> str:
  """Returns docs/metrics.md."""
  lines = [_HEAD]
  for section in SECTIONS:
    lines += [f'## {section.title}\n', f'{section.text}\n']
    lines += ['| metric | unit | meaning |', '|---|---|---|']
    for metric in section.metrics:
      names = ', '.join(f'`{p}{metric.name}`' for p in section.prefixes)
      meaning = metric.meaning.replace('|', r'\|')
      lines.append(f'| {names} | {metric.unit} | {meaning} |')
    lines.append('')
  return '\n'.join(lines)


if __name__ == '__main__':
  _PAGE.write_text(page(), encoding='utf-8')
