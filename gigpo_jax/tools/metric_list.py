"""List every metric that a run writes, with its unit and meaning.

Run `python -m gigpo_jax.tools.metric_list` to write docs/metrics.md from this
list. Tests compare the list with the page, with the metrics that runs write,
and with the names in the code.
"""

import argparse
import dataclasses
import pathlib
import re
import textwrap

_PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'metrics.md'


@dataclasses.dataclass(frozen=True)
class Metric:
  """A metric, or a family of metrics.

  Attributes:
    name: name without prefix; `<...>` stands for any text.
    unit: 'share' is a number in [0, 1]; '1' is dimensionless.
    meaning: a noun phrase.
  """

  name: str
  unit: str
  meaning: str

  def matches(self, name: str) -> bool:
    """Returns whether a name, without prefix, is of this metric or family."""
    parts = re.split(r'<[a-z_]+>', self.name)
    return bool(re.fullmatch('.+'.join(map(re.escape, parts)), name))


@dataclasses.dataclass(frozen=True)
class Section:
  """A section of the page.

  Attributes:
    title: heading.
    text: paragraph about all metrics of the section.
    prefixes: prefixes with which each metric is written.
    metrics: the metrics; their names have no prefix.
  """

  title: str
  text: str
  prefixes: tuple[str, ...]
  metrics: tuple[Metric, ...]


SECTIONS = (
  Section(
    'Episodes',
    '`train/` covers all episodes of the iteration, including groups that a '
    'filter drops; with `rollout.carry_over`, an episode counts in the '
    'iteration that trains on it. `eval/` covers the evaluation tasks, played '
    "before the iteration's update. An episode that its environment aborted "
    'counts as a failure with score 0. With `reward.functions`, '
    '`train/episode_reward` includes them, and `train/environment_reward`, the '
    "environment's own reward, and `train/NAME` of each function are means "
    'over steps.',
    ('train/', 'eval/'),
    (
      Metric('success_rate', 'share', 'successful episodes'),
      Metric(
        'success_rate/<type>', 'share', 'successful episodes of a task type'
      ),
      Metric(
        'score',
        'share',
        'mean score; only if the environment reports scores',
      ),
      Metric(
        'episode_reward',
        'reward',
        'mean sum of rewards, before any penalty',
      ),
      Metric('episode_length', 'steps', 'mean number of steps'),
      Metric('invalid_action_rate', 'share', 'steps with an invalid response'),
      Metric(
        'revisit_rate',
        'share',
        'steps in a state (anchor) that their episode has visited before',
      ),
      Metric(
        'truncated_rate', 'share', 'responses truncated at the token limit'
      ),
      Metric('response_tokens', 'tokens', 'mean length of a response'),
      Metric('response_tokens_max', 'tokens', 'longest response'),
      Metric('prompt_tokens', 'tokens', 'mean length of a prompt'),
      Metric(
        'shortened_prompts',
        'steps',
        'prompts shortened to the token limit',
      ),
      Metric(
        'failed_episodes', 'episodes', 'episodes that the environment aborted'
      ),
      Metric(
        'failed_episodes/<cause>',
        'episodes',
        'aborted episodes by `env_pool.CAUSES`',
      ),
      Metric(
        'inadmissible_action_rate',
        'share',
        'steps with an inadmissible action',
      ),
      Metric(
        'webshop_score',
        'share',
        'mean score of the episodes that the shop ended (WebShop)',
      ),
      Metric('search_rate', 'share', 'steps that searched (search QA)'),
      Metric(
        'trap_rate', 'share', 'episodes that ended in a trap (keys and doors)'
      ),
      Metric('blocked_action_rate', 'share', 'steps without a move (Sokoban)'),
      Metric(
        'environment_reward',
        'reward',
        "the environment's own, per step; only `train/`",
      ),
      Metric('room', '1', 'mean index of the room (the toy environment)'),
    ),
  ),
  Section(
    'Evaluation',
    'Only for iterations with an evaluation (`evaluation.every`).',
    ('eval/',),
    (
      Metric(
        'success_low', 'share', 'lower end of the 95 % interval of success_rate'
      ),
      Metric('success_high', 'share', 'upper end of that interval'),
      Metric(
        'pass_at/<k>',
        'share',
        'tasks solved by one of k episodes (`evaluation.repeats`)',
      ),
      Metric('score_best_of/<k>', 'share', 'mean best score of k episodes'),
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
    'Advantages of rows (steps) and tokens. Metrics of anchor groups are '
    'written for every algorithm, with the groups that GiGPO would form. An '
    'algorithm without an episode and a step advantage (A_E and A_S) reports '
    'those of GiGPO with `algorithm.norm`, `discount` and `invalid_penalty`. '
    '`std`, `trained_share` and `effective_tokens` are those after '
    '`algorithm.modulators`, all others those before; `filter.select` changes '
    'none of them.',
    ('advantage/',),
    (
      Metric(
        'zero_variance_groups',
        'share',
        'zero-variance groups, whose episode advantage is 0',
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
      Metric(
        'anchor_groups_of_8_and_more', 'share', 'anchor groups of 8 or more'
      ),
      Metric('gain_mean', '1', "`igpo`: mean gain of the answer's probability"),
      Metric(
        'cheap_success',
        'share',
        '`a2fm`: successes of members forced into the cheapest mode',
      ),
      Metric(
        'costlier_mode_share',
        'share',
        '`a2fm`: free members that chose a costlier mode',
      ),
      Metric('episode_abs_mean', '1', 'mean of |episode advantage|'),
      Metric('step_abs_mean', '1', 'mean of |step advantage|'),
      Metric('episode_std', '1', 'standard deviation of episode advantages'),
      Metric('step_std', '1', 'standard deviation of step advantages'),
      Metric(
        'correlation',
        '1',
        'correlation of episode and step advantages; absent if either is '
        'constant',
      ),
      Metric(
        'abs_mean',
        '1',
        'mean of |advantage| over rows, or tokens (`ppo`, `t_spmo`); only '
        'without A_E and A_S',
      ),
      Metric('std', '1', 'standard deviation of the advantage over tokens'),
      Metric('trained_share', 'share', 'tokens with nonzero advantage'),
      Metric(
        'effective_tokens',
        'tokens',
        'effective sample size: (sum of |A|)^2 / (sum of A^2) over tokens',
      ),
    ),
  ),
  Section(
    'Rewards',
    'Only with the options of `reward` that produce them.',
    ('reward/',),
    (
      Metric(
        'kl',
        'nats',
        'mean estimate of the KL to the reference policy per token that the '
        'current policy sampled',
      ),
      Metric('overlong', '1', 'mean share of the largest length penalty'),
      Metric('scored/<function>', '1', 'mean per row, of reward.scored'),
    ),
  ),
  Section(
    'Groups trained on',
    'Only with a filter (`filter.*`).',
    ('filter/',),
    (
      Metric('refills', '1', 'additional rounds of collection'),
      Metric('groups_kept', 'groups', 'groups that are trained on'),
      Metric(
        'nonzero_variance_share',
        'share',
        'played groups whose episodes differ in reward',
      ),
      Metric('rows_share', 'share', 'rows that `filter.select` keeps'),
      Metric(
        'tokens_share',
        'share',
        'completion tokens that `filter.select` keeps',
      ),
      Metric(
        'fisher_mean',
        'nats',
        "mean of half the squared change of a token's log-prob by its own "
        'step (`capo`)',
      ),
      Metric('fisher_max', 'nats', 'largest such value of a token'),
    ),
  ),
  Section(
    'Groups carried over',
    'Only with `rollout.carry_over`. `staleness` counts iterations between '
    'sampling a step and training on it.',
    ('carry/',),
    (
      Metric(
        'waiting_groups', 'groups', 'groups that wait for the next iteration'
      ),
      Metric(
        'paused_episodes',
        'episodes',
        'their episodes that continue in the next iteration',
      ),
      Metric('staleness_mean', 'iterations', 'mean over the trained steps'),
      Metric('staleness_max', 'iterations', 'largest staleness'),
      Metric('stale_share', 'share', 'trained steps of an earlier iteration'),
    ),
  ),
  Section(
    'Continuations',
    'Only with algorithms that play further episodes: `vineppo` from each '
    'state, `remax` a greedy one from the start of each task.',
    ('continuations/',),
    (
      Metric(
        'states',
        'states',
        'distinct states of the trained episodes from which others start',
      ),
      Metric(
        'env_steps', 'steps', 'steps of continuations, with replayed ones'
      ),
      Metric('tokens', 'tokens', 'tokens sampled in continuations'),
      Metric('value_mean', 'reward', 'mean of the values of states'),
      Metric(
        'standard_error', 'reward', 'root mean square standard error of a value'
      ),
    ),
  ),
  Section(
    'Branches',
    'Only with algorithms whose groups grow by branches, such as `arpo`.',
    ('branching/',),
    (
      Metric(
        'branches_share', 'share', 'episodes that repeat turns of another one'
      ),
      Metric('turn_mean', 'turns', 'mean number of turns that they repeat'),
      Metric('repeated_steps', 'steps', 'environment steps that are replayed'),
      Metric('new_steps', 'steps', 'environment steps with a sampled response'),
    ),
  ),
  Section(
    'State of the algorithm',
    'Only with `risk_po`: what its next iteration uses.',
    ('state/',),
    (
      Metric('quantile_low', 'reward', 'lower quantile of sums of returns'),
      Metric('quantile_high', 'reward', 'upper quantile of sums of returns'),
    ),
  ),
  Section(
    'Loss',
    'Means over all trained tokens of the iteration, at the parameters of '
    'each update.',
    ('loss/',),
    (
      Metric(
        'total',
        '1',
        'the loss of a token, without the weights of `loss.aggregation`',
      ),
      Metric(
        'policy',
        '1',
        'surrogate, without the entropy and KL terms, or squared error '
        '(`row_regression`)',
      ),
      Metric(
        'entropy', 'nats', "entropy of the policy's next-token distribution"
      ),
      Metric(
        'entropy_outside',
        'nats',
        'weighted distance of entropy from its band; only with '
        '`loss.entropy_band.weight`',
      ),
      Metric(
        'kl',
        'nats',
        'estimated KL to the reference policy; only if the loss compares with '
        'it',
      ),
    ),
  ),
  Section(
    'Teacher',
    'Only with `teacher.mu_peak`. 0 in iterations with mu = 0.',
    ('teacher/',),
    (
      Metric('loss', '1', "mean loss of the teacher's tokens"),
      Metric('tokens', 'tokens', "the teacher's tokens"),
    ),
  ),
  Section(
    'Preferences',
    'Only with `sft.loss=dpo` (`launch/sft.py`): pairs before their update.',
    ('preference/',),
    (
      Metric('margin', '1', "mean margin of the pairs, DPO's implicit reward"),
      Metric('accuracy', 'share', 'pairs with a margin above 0'),
    ),
  ),
  Section(
    'Probability ratios',
    'Ratios of the updated policy to the policy of the old log-probs '
    '(`loss.old_log_probs`), over trained tokens. With `loss.ratio_level=row` '
    'each token has the ratio of its row.',
    ('ratio/',),
    (
      Metric('mean', '1', 'mean ratio'),
      Metric('max', '1', 'largest ratio'),
      Metric(
        'kl',
        'nats',
        'k3 estimate of the KL to the policy of the old log-probs, always from '
        "the tokens' own ratios",
      ),
      Metric(
        'clipped_low',
        'share',
        'tokens clipped at the lower bound (negative advantage; cispo: any)',
      ),
      Metric(
        'clipped_high',
        'share',
        'tokens clipped at the upper bound (positive advantage; cispo: any)',
      ),
      Metric(
        'clipped_dual',
        'share',
        'tokens clipped by `loss.dual_clip`; only if it is set',
      ),
    ),
  ),
  Section(
    'Updates',
    'Optimizer steps of the iteration.',
    ('update/',),
    (
      Metric('count', 'updates', 'optimizer steps, skipped ones included'),
      Metric('tokens', 'tokens', 'trained tokens, skipped updates excluded'),
      Metric('grad_norm', '1', 'mean norm of the gradient before clipping'),
      Metric(
        'learning_rate',
        '1',
        'of the first step, without the factor of `guard.*`',
      ),
      Metric(
        'skipped',
        'updates',
        'updates skipped because the loss or gradient was not finite',
      ),
      Metric(
        'skipped_in_row',
        'updates',
        'consecutive skipped updates at the end of the iteration',
      ),
      Metric(
        'most_skipped_in_row',
        'updates',
        'most consecutive skipped updates in the iteration',
      ),
      Metric(
        'next_kl_factor',
        '1',
        "factor of the KL's weight in the next iteration (`loss.kl_target`)",
      ),
      Metric('epoch', 'epochs', 'epoch of the data (only `launch/sft.py`)'),
    ),
  ),
  Section(
    'Guards',
    'Guards against collapse (`guard.*`). Absent before the first alarm.',
    ('guard/',),
    (
      Metric(
        'alarms',
        'alarms',
        'metrics beyond their levels; only in iterations with alarms',
      ),
      Metric(
        'step_scale',
        '1',
        'factor of later updates of the policy; only below 1 '
        '(`guard.action=shrink` or `rollback`)',
      ),
      Metric(
        'rollbacks',
        'rollbacks',
        'total number of rollbacks (`guard.action=rollback`)',
      ),
    ),
  ),
  Section(
    'Critic',
    'Only with PPO.',
    ('critic/',),
    (
      Metric(
        'loss',
        '1',
        'half the squared error of the values, clipped, averaged over tokens',
      ),
      Metric('value_mean', 'reward', 'mean value before the update'),
      Metric('explained', 'share', 'explained variance of the targets'),
      Metric('clipped', 'share', 'positions with clipped value change'),
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
    'How rows are packed for the updates of the policy.',
    ('packs/',),
    (
      Metric(
        'tokens',
        'tokens',
        'computed tokens of all epochs; those that rows share count once',
      ),
      Metric('padding', 'share', 'share of padding in all computed positions'),
      Metric(
        'shared_tokens',
        'tokens',
        'tokens saved because several rows share them',
      ),
    ),
  ),
  Section(
    'Sampler and learner',
    'Differences between the log-probs that the sampler reports and those that '
    'the learner computes for the same tokens before the update. Rows of '
    'earlier policies do not count. If the log-probs of the sampler are used '
    '(`loss.old_log_probs`), the rows are those of one microbatch, the longest '
    'ones.',
    ('sampler/',),
    (
      Metric(
        'log_prob_difference_mean', 'nats', 'mean |difference| over tokens'
      ),
      Metric('log_prob_difference_max', 'nats', 'largest |difference|'),
      Metric(
        'sequence_ratio_mean',
        '1',
        'mean over rows of the probability ratio, learner to sampler',
      ),
      Metric('sequence_ratio_max', '1', 'largest such ratio'),
      Metric(
        'log_probs_reused',
        '0 or 1',
        'whether `loss.old_log_probs=auto` chose those of the sampler',
      ),
    ),
  ),
  Section(
    'Rollout',
    'Speed and scheduling of the last rollout, in the main process; '
    '`env_restarts` and `env_recycled` are sums over all processes.',
    ('rollout/',),
    (
      Metric('prefill_tokens', 'tokens', 'prompt tokens prefilled'),
      Metric(
        'reused_tokens',
        'tokens',
        'prompt tokens whose keys and values were in the cache',
      ),
      Metric(
        'prefill_tokens_per_sec',
        'tokens/s',
        'prompt tokens prefilled per second of the whole rollout',
      ),
      Metric(
        'decode_tokens_per_sec',
        'tokens/s',
        'tokens sampled per second of the whole rollout',
      ),
      Metric(
        'slot_occupancy', 'share', 'decode steps of slots that produced a token'
      ),
      Metric(
        'tokens_per_step',
        'tokens',
        'tokens sampled in a decode step of a slot (`rollout.draft_tokens`)',
      ),
      Metric(
        'shared_prompt_share',
        'share',
        'prompt tokens that were already computed for another request',
      ),
      Metric('prefill_padding_share', 'share', 'padding in prefill'),
      Metric(
        'host_wait_share',
        'share',
        'upper bound of the time in which the device waited for the host',
      ),
      Metric(
        'env_wait_share',
        'share',
        'time in which the sampler waited for environments',
      ),
      Metric('env_secs_per_step', 's', 'mean time of an environment step'),
      Metric('env_restarts', 'processes', 'workers restarted since the start'),
      Metric(
        'env_recycled',
        'processes',
        'workers replaced since the start for their resets or memory',
      ),
      Metric(
        'reward_wait_secs',
        's',
        'time in which only `reward.functions` ran',
      ),
      Metric(
        'compilations',
        'programs',
        'programs compiled by the sampler since the start',
      ),
    ),
  ),
  Section(
    'Time',
    'Wall time of the parts of the iteration.',
    ('time/',),
    (
      Metric(
        'iteration_secs', 's', 'the whole iteration, except for its checkpoint'
      ),
      Metric(
        'rollout_secs',
        's',
        'playing the episodes, and the evaluation if it is inside the rollout',
      ),
      Metric(
        'continuations_secs', 's', 'playing continuations, if there are any'
      ),
      Metric(
        'update_secs',
        's',
        'rows, scores, advantages, log-probs and updates',
      ),
      Metric('rows_secs', 's', 'building rows from episodes'),
      Metric('advantages_secs', 's', 'computing advantages'),
      Metric(
        'episodes_secs', 's', 'writing episodes; only with `episodes.every`'
      ),
      Metric(
        'evaluation_secs',
        's',
        'the evaluation, if it is not inside the rollout',
      ),
    ),
  ),
  Section(
    'Cost so far',
    'Totals since the start of the run, without evaluations.',
    ('spent/',),
    (
      Metric(
        'episodes', 'episodes', 'episodes played, including dropped groups'
      ),
      Metric(
        'env_steps',
        'steps',
        'environment steps of these episodes and of continuations, with '
        'replayed ones',
      ),
      Metric(
        'tokens',
        'tokens',
        'tokens sampled in these episodes and in continuations',
      ),
    ),
  ),
)

_HEAD = """\
# Metrics

Every iteration is a line of `metrics.jsonl` in the work directory,
`{"iteration": n, "NAME": value, ...}`, and a step in `tensorboard/` and, with
`metrics.wandb`, in Weights & Biases. A value that is not finite is `null`.
`rollout/`, `sampler/` and `time/` depend on the machine and its load; all other
metrics are identical whenever a run is repeated or resumed in float32 on a CPU
with `loss.old_log_probs=learner`
([otherwise](troubleshooting.md#two-runs-of-one-command-differ)).

An environment adds metrics with `StepResult.metrics`. Their means over the
steps that report them are `train/NAME` and `eval/NAME`, or `train/env_NAME` and
`eval/env_NAME` if the name is reserved.

`python -m gigpo_jax.tools.metric_list` generates this page.
"""


def find(name: str) -> Metric | None:
  """Returns the entry of a metric, or None if it is not listed."""
  for section in SECTIONS:
    for prefix in section.prefixes:
      for metric in section.metrics:
        if name.startswith(prefix) and metric.matches(name[len(prefix) :]):
          return metric
  return None


def page() -> str:
  """Returns the text of docs/metrics.md."""
  lines = [_HEAD]
  for section in SECTIONS:
    text = textwrap.fill(section.text, 120, break_on_hyphens=False)
    lines += [f'## {section.title}\n', f'{text}\n']
    lines += ['| metric | unit | meaning |', '|---|---|---|']
    for metric in section.metrics:
      names = ', '.join(f'`{p}{metric.name}`' for p in section.prefixes)
      meaning = metric.meaning.replace('|', r'\|')
      lines.append(f'| {names} | {metric.unit} | {meaning} |')
    lines.append('')
  return '\n'.join(lines)


if __name__ == '__main__':
  argparse.ArgumentParser(description=__doc__).parse_args()
  _PAGE.write_text(page(), encoding='utf-8')
