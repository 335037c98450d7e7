"""The update: rows and columns in, new parameters and metrics out.

Rows on the host are shuffled and split into mini-batches, with one optimizer
step each. Mini-batches are split into microbatches of few shapes, whose
gradients are summed in float32. The loss's normalizer is computed before the
first microbatch. The loss is therefore independent of the microbatch size, the
length buckets, the mesh and the sharing of tokens. This module is independent
of environments, texts and algorithms.
"""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from gigpo_jax import (
  batch,
  deprecated,
  losses,
  options,
  packing,
  prompt_scores,
  teacher,
  token_batch,
)
from gigpo_jax import mesh as mesh_lib
from gigpo_jax import optimizer as optimizer_lib
from gigpo_jax.models import layer_runs, qwen
from gigpo_jax.programs import learner_programs
from gigpo_jax.runtime import compilation, distributed

TrainState = learner_programs.TrainState

# The signal that needs log-probs of prompts.
_PROMPTS = 'prompt_log_probs'


def adamw(learning_rate: float, **values: Any) -> optax.GradientTransformation:
  """Deprecated: use `optimizer.AdamW(...).make()`."""
  deprecated.warn('learner.adamw', 'optimizer.AdamW(...).make()')
  return optimizer_lib.AdamW(learning_rate, **values).make()


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of updates, `config.learner`; see configs/base.py."""

  epochs: int = options.number(1, low=1)
  minibatch_rows: int = options.number(256, low=1)
  microbatch_tokens: int = options.number(40960, low=1)
  max_skipped_in_row: int = options.number(5, low=1)
  share_prompts: bool = False
  length_buckets: tuple[int, ...] = options.sizes((2560,), or_none=True)

  def __post_init__(self):
    options.check(self)


@dataclasses.dataclass(frozen=True)
class LossOptions:
  """Options of all losses.

  Attributes:
    aggregation: token_mean, sequence_mean, sequence_sum or fixed_length; see
      `losses.row_weights`.
    old_log_probs: denominators of the ratios. learner recomputes them before
      the first update. sampler takes them as sampled, which is cheaper, but
      their last bits depend on the scheduling of requests; with
      `rollout.carry_over`, they are those of the policy that sampled the turn.
      auto takes the sampler's in iterations in which they differ from the
      learner's, on one microbatch, by at most `max_log_prob_gap`.
    max_log_prob_gap: largest mean difference for auto, in nats per token; a
      twentieth of the default `clip_epsilon`. Smaller bounds of ratios need a
      smaller one.
    tis_clip: largest weight of truncated importance sampling, at least 1, which
      corrects for the sampler's arithmetic and for `rollout.carry_over`. Needs
      old_log_probs=learner, or auto: then the weights are 1 where the sampler's
      are used. None: off.
    tis_level: unit of these weights: token, or row for the product over a row's
      tokens.
  """

  aggregation: str = options.choice('token_mean', losses.AGGREGATIONS)
  old_log_probs: str = options.choice('learner', ('learner', 'sampler', 'auto'))
  max_log_prob_gap: float = options.number(0.01, low=0)
  tis_clip: float | None = options.number(None, low=1, note='None is off')
  tis_level: str = options.choice('token', losses.RATIO_LEVELS)

  def __post_init__(self):
    options.check(self)
    if self.tis_clip and self.old_log_probs == 'sampler':
      raise ValueError(
        f"tis_clip={self.tis_clip}: compares the learner's log-probs with the "
        "sampler's; needs loss.old_log_probs=learner or auto"
      )


class Learner:
  """Trains a model and computes its log-probs or values.

  Call `values` if the model has a value head, else `log_probs`.

  Args:
    config: shape of the model.
    mesh: device mesh; sequences of a microbatch are sharded over `mesh.BATCH`.
    loss: the loss of each token; see `token_batch.Loss`.
    optimizer: the optimizer; see `optimizer.AdamW`.
    epochs: number of passes over the rows of `update`.
    minibatch_rows: maximum number of rows of an update; with shared prompts,
      the rows of the last group may exceed it.
    microbatch_tokens: tokens of a microbatch, over all devices; see
      `packing.shapes`.
    length_buckets: increasing lengths of sequences. Rows are packed into
      sequences of the smallest length that holds the longest of them.
    max_completion_tokens: C.
    temperature: temperature of log-probs and entropies.
    aggregation: one of `losses.AGGREGATIONS`.
    share_prompts: whether rows that begin with the same prompt are in the same
      update and share its computation.
    turns: largest number of completions in a row; see `packing.Packer`.
    scale_updates: whether `update` accepts a step scale.
    signals: names of the outputs of `signals`.
    teacher_loss: the loss of a teacher's rows; None: there are none.
    seed: seed of the shuffling.

  Attributes:
    base: the frozen parameters, if the network has adapters; otherwise empty.
    columns: names of the columns that `update` requires.

  Raises:
    ValueError: if the aggregation is unknown.
  """

  def __init__(  # noqa: PLR0913
    self,
    config: qwen.QwenConfig,
    mesh: jax.sharding.Mesh,
    *,
    loss: token_batch.Loss,
    optimizer: optax.GradientTransformation,
    minibatch_rows: int,
    microbatch_tokens: int,
    length_buckets: Sequence[int],
    max_completion_tokens: int,
    temperature: float = 1.0,
    aggregation: str = 'token_mean',
    share_prompts: bool = False,
    turns: int = 1,
    epochs: int = 1,
    scale_updates: bool = False,
    signals: Sequence[str] = (),
    teacher_loss: token_batch.Loss | None = None,
    seed: int = 0,
  ):
    options.check_choice('aggregation', aggregation, losses.AGGREGATIONS)
    if isinstance(optimizer, optimizer_lib.AdamW):
      raise ValueError(
        'optimizer=AdamW(...): options of an optimizer; must be '
        'AdamW(...).make(), or an optimizer of optax'
      )
    loss = losses.replace_old(loss)
    self._mesh = mesh
    self.columns = tuple(loss.columns)
    self._teacher_columns = tuple(teacher_loss.columns) if teacher_loss else ()
    self._minibatch_rows, self._epochs = minibatch_rows, epochs
    branches = layer_runs.can_branch(config)
    make_packer = functools.partial(
      packing.Packer,
      microbatch_tokens,
      mesh_lib.batch_shards(mesh),
      length_buckets,
      by_agent=bool(config.adapters and config.adapters.agents),
    )
    self._packer = make_packer(
      max_completion_tokens,
      share=share_prompts,
      branches=branches,
      turns=turns,
    )
    self._signals = tuple(signals)
    # Prompt tokens are scored like those of a completion.
    self._signal_packer = self._packer
    if _PROMPTS in signals:
      self._signal_packer = make_packer(length_buckets[-1])
    self._largest = max(
      self._packer.shapes, key=lambda shape: (shape.length, shape.sequences)
    )
    self._max_completion = max_completion_tokens
    self._aggregation = aggregation
    self._seed, self._scale_updates = seed, scale_updates
    self._programs = learner_programs.LearnerPrograms(
      config,
      mesh,
      loss,
      optimizer,
      temperature,
      self._empty_arrays,
      tree=share_prompts and branches,
      scaled=scale_updates,
      signals=[name for name in self._signals if name != _PROMPTS],
      teacher_loss=teacher_loss,
    )
    self.base: dict = {}

  @property
  def compilations(self) -> int:
    """Number of programs compiled so far."""
    return len(self._programs.table)

  def init(self, params: dict) -> TrainState:
    """Returns an initial state.

    Args:
      params: parameters of the network; the learner takes ownership and may
        donate them. With adapters, all other parameters become `base`.
    """
    programs = self._programs
    params, self.base = programs.split(params)
    with jax.set_mesh(self._mesh):
      params = jax.device_put(params, programs.param_shardings)
      self.base = jax.device_put(self.base, programs.base_shardings)
      updates = mesh_lib.place(np.zeros((), np.int32), programs.replicated)
      return TrainState(params, programs.run('init', params), updates)

  def abstract_state(self) -> tuple[TrainState, dict]:
    """Returns shapes, dtypes and shardings of a state and of `base`."""
    return self._programs.abstract_state()

  def abstract_reference(self) -> dict:
    """Returns shapes, dtypes and shardings of a frozen copy of the parameters.

    {} with adapters, where `base` is the reference policy.
    """
    return self._programs.abstract_reference()

  def lowerings(
    self, *, reference: bool = False
  ) -> dict[learner_programs.Key, compilation.Lowering]:
    """Returns functions that lower all programs; see `LearnerPrograms`.

    Args:
      reference: whether there is a reference policy.
    """
    return self._programs.lowerings(
      self._packer.shapes, self._packer.largest_shapes, reference=reference
    )

  def lower(self, names: Sequence[str]) -> dict[str, jax.stages.Lowered]:
    """Lowers programs by name, those of the longest sequences.

    The mesh's devices need not exist.

    Args:
      names: 'outputs', 'reference outputs' (of a reference policy),
        'accumulate' or 'apply'.
    """
    largest = [self._largest]
    lowerings = self._programs.lowerings(largest, largest, reference=True)
    outputs = [f for key, f in lowerings.items() if key[0] == 'outputs']
    by_name = {key[0]: lower for key, lower in lowerings.items()}
    by_name |= {'outputs': outputs[0], 'reference outputs': outputs[-1]}
    return {name: by_name[name]() for name in names}

  def compile(
    self, compiler: compilation.Compiler, *, reference: bool = False
  ) -> list[concurrent.futures.Future]:
    """Starts the compilation of all programs, so that none compiles later.

    Args:
      compiler: compiles in the background.
      reference: whether there is a reference policy.

    Returns:
      One future per program.
    """
    lowerings = self.lowerings(reference=reference)
    return self._programs.table.compile(compiler, lowerings)

  def warm_up(
    self, state: TrainState, reference: dict | None = None
  ) -> TrainState:
    """Compiles the programs that are missing and runs the largest ones once.

    This shows whether they fit into memory.

    Args:
      state: donated.
      reference: frozen parameters of a reference policy.

    Returns:
      The unchanged state.
    """
    with compilation.Compiler() as compiler:
      has_reference = reference is not None
      compilation.wait(self.compile(compiler, reference=has_reference))
    run = self._programs.run
    empty = self._packer.empty(self._largest)
    with jax.set_mesh(self._mesh):
      self._run_outputs(state.params, empty)
      if self._signals:
        scored = self._signal_packer.empty(self._largest)
        self._run_outputs(state.params, scored, 'signals')
      if reference is not None:
        self._run_outputs(reference, empty)
      grads, sums = run('zeros', state.params, np.float32(0), np.float32(1))
      arrays = mesh_lib.place_rows(
        self._mesh, self._empty_arrays(self._largest, 'accumulate')
      )
      grads, sums = run(
        'accumulate', state.params, self.base, arrays, grads=grads, sums=sums
      )
      # An update with NaN gradients is skipped and leaves the state unchanged.
      grads = run('fill', grads, np.float32(np.nan))
      state, _ = run('apply', state=state, grads=grads, sums=sums)
      return jax.block_until_ready(state)

  def log_probs(self, params: dict, rows: batch.Rows) -> np.ndarray:
    """Returns log-probs of all completion tokens, [R, C] float32.

    They are computed at `temperature`, and are 0 past a completion and in
    padding rows.

    Args:
      params: parameters in any float dtype. For a network with adapters: the
        adapters, or {} for the network without them.
      rows: the rows of an iteration.
    """
    return self._outputs(params, rows)

  def values(self, params: dict, rows: batch.Rows) -> np.ndarray:
    """Returns the value before each completion token, [R, C] float32.

    It is 0 past a completion and in padding rows.
    """
    return self._outputs(params, rows)

  def signals(self, params: dict, rows: batch.Rows) -> dict[str, np.ndarray]:
    """Returns the outputs that `signals` of the constructor names.

    All of them come from one forward pass.

    Args:
      params: the trained parameters.
      rows: the rows of an iteration.

    Returns:
      float32 arrays, 0 for padding: 'log_probs' as the method; 'entropies' in
      nats; 'feature_squares', the squared norm of the last hidden state over
      the temperature; 'NAME@X' for one of these at X times the temperature; and
      'prompt_log_probs', [R, L - 1], which starts with the prompt's second
      token. Each other array is [R, C].
    """
    if not self._signals:
      return {}
    has_prompts = _PROMPTS in self._signals
    scored = prompt_scores.make_rows(rows) if has_prompts else rows
    results: dict[str, np.ndarray] = {}
    for microbatch, outputs in self._score(params, scored, 'signals'):
      for name, values in outputs.items():
        result = results.setdefault(name, _zeros(scored))
        microbatch.scatter(mesh_lib.to_host(values), result)
    if not has_prompts:
      return results
    prompts = results['log_probs']
    own = {k: prompt_scores.completions(x, rows) for k, x in results.items()}
    return own | {_PROMPTS: np.where(rows.prompt_mask, prompts, 0)}

  def _outputs(self, params: dict, rows: batch.Rows) -> np.ndarray:
    result = _zeros(rows)
    for microbatch, outputs in self._score(params, rows, 'outputs'):
      microbatch.scatter(mesh_lib.to_host(outputs), result)
    return result

  def _score(
    self, params: dict, rows: batch.Rows, name: str
  ) -> list[tuple[packing.Microbatch, Any]]:
    """Dispatches a program for all rows; returns outputs by microbatch."""
    packer = self._signal_packer if name == 'signals' else self._packer
    index = np.flatnonzero(rows.real)
    with jax.set_mesh(self._mesh):
      return [
        (microbatch, self._run_outputs(params, microbatch, name))
        for microbatch in packer.microbatches(rows, index, largest=True)
      ]

  def _run_outputs(
    self, params: dict, microbatch: packing.Microbatch, name: str = 'outputs'
  ) -> Any:
    arrays = mesh_lib.place_rows(self._mesh, microbatch.inputs())
    return self._programs.run(name, params, self.base, arrays)

  def update(
    self,
    state: TrainState,
    rows: batch.Rows,
    *old_advantages: np.ndarray,
    iteration: int,
    skipped_before: float = 0.0,
    step_scale: float = 1.0,
    trained: np.ndarray | None = None,
    teacher_batch: teacher.TeacherBatch | None = None,
    **columns: np.ndarray | float | None,
  ) -> tuple[TrainState, dict[str, float]]:
    """Trains on the rows, one optimizer step per mini-batch.

    Args:
      state: donated.
      rows: the rows of the iteration; padding rows are ignored.
      *old_advantages: deprecated: the column 'advantages' by position.
      iteration: with the seed, determines the shuffling.
      skipped_before: number of consecutive updates skipped just before.
      step_scale: factor of the learning rate; needs `scale_updates`.
      trained: True at the completion tokens to train on, [R, C]; None for all.
      teacher_batch: rows of a teacher and their weight; each mini-batch of
        each epoch gets an equal share of the rows, if there are enough.
      **columns: the columns that the loss reads: one number per row [R] or per
        completion token [R, C], or one for all tokens.

    Returns:
      The new state and metrics. Metrics of the loss are means over all trained
      tokens, or maxima if their names end in '/max'. An update is skipped if
      its loss or gradient is not finite, and its tokens do not count:
      'update/skipped' counts these updates, 'update/skipped_in_row' the
      consecutive ones at the end, and 'update/most_skipped_in_row' the longest
      run of consecutive ones. If all updates are skipped, means and maxima are
      NaN.

    A mini-batch without trained tokens is an update, too: as in verl, the
    optimizer moves parameters by their momentum and weight decay.

    Raises:
      ValueError: if a column is missing or unknown, a row is longer than the
        last bucket, there is a step scale without `scale_updates`, or the
        processes of a run have other rows, columns or trained tokens.
    """
    if old_advantages:
      columns = _old_columns(old_advantages[0], columns)
    columns = self._check_columns(rows, columns)
    if step_scale != 1 and not self._scale_updates:
      raise ValueError(f'step_scale={step_scale}: needs scale_updates=True')
    check_same_rows(rows, *([teacher_batch.rows] if teacher_batch else []))
    tokens = {} if trained is None else {'trained': trained}
    distributed.check_close(columns | tokens)
    minibatches = [
      minibatch
      for epoch in range(self._epochs)
      for minibatch in self._minibatches(rows, iteration, epoch)
    ]
    self._packer.take_metrics()  # Drops those of outputs.
    run = self._programs.run
    with jax.set_mesh(self._mesh):
      grads, sums = run(
        'zeros',
        state.params,
        np.float32(skipped_before),
        np.float32(step_scale),
      )
      for n, minibatch in enumerate(minibatches):
        weights = self._weights(rows, minibatch, trained)
        parts = [('accumulate', rows, minibatch, columns, weights)]
        taught = self._teacher_part(teacher_batch, n, len(minibatches))
        if taught is not None:
          weights *= np.float32(1 - teacher_batch.weight)
          parts.append(taught)
        for name, part_rows, index, part_columns, part_weights in parts:
          for microbatch in self._packer.microbatches(part_rows, index):
            arrays = mesh_lib.place_rows(
              self._mesh, _gather(microbatch, part_columns, part_weights)
            )
            grads, sums = run(
              name, state.params, self.base, arrays, grads=grads, sums=sums
            )
        state, sums = run('apply', state=state, grads=grads, sums=sums)
        grads = run('fill', grads, np.float32(0))
    metrics = jax.device_get(sums).metrics(len(minibatches))
    return state, metrics | self._packer.take_metrics()

  def sampler_difference(
    self,
    params: dict,
    rows: batch.Rows,
    log_probs: np.ndarray | None = None,
  ) -> dict[str, float]:
    """Returns metrics of the sampler's deviation from the learner's log-probs.

    Rows that an earlier policy sampled do not count.

    Args:
      params: the parameters that were sampled from.
      rows: the rows of the iteration.
      log_probs: the learner's log-probs, [R, C]. None computes those of one
        microbatch of the longest rows.

    Returns:
      Mean and maximum over tokens of the absolute difference, and mean and
      maximum over rows of the probability ratio of learner to sampler.
    """
    index = np.flatnonzero(rows.real & (rows.ages == 0))
    if not len(index):
      return {}
    if log_probs is None:
      microbatches = self._packer.microbatches(rows, index, largest=True)
      index = next(microbatches).rows
      rows = rows.take(index)
      log_probs = self.log_probs(params, rows)
    else:
      rows, log_probs = rows.take(index), log_probs[index]
    mask = rows.completion_mask
    if not mask.any():
      return {}
    difference = log_probs - rows.sampler_log_probs
    absolute = np.abs(difference[mask])
    ratios = np.exp(np.where(mask, difference, 0).sum(axis=1))
    return {
      'sampler/log_prob_difference_mean': float(absolute.mean()),
      'sampler/log_prob_difference_max': float(absolute.max()),
      'sampler/sequence_ratio_mean': float(ratios.mean()),
      'sampler/sequence_ratio_max': float(ratios.max()),
    }

  def _check_columns(
    self, rows: batch.Rows, columns: dict[str, np.ndarray | float | None]
  ) -> dict[str, np.ndarray]:
    """Returns the columns as arrays [R] or [R, C], float32."""
    accepted = f'the loss reads {", ".join(self.columns) or "no columns"}'
    for name in self.columns:
      if columns.get(name) is None:
        raise ValueError(f'{name}=None: missing; {accepted}')
    token_shape = rows.sampler_log_probs.shape
    arrays = {}
    for name, column in columns.items():
      if name not in self.columns:
        raise ValueError(f'{name}: unknown column; {accepted}')
      array = np.asarray(column, np.float32)
      if not array.shape:
        array = np.broadcast_to(array, token_shape[:1])
      if array.shape not in (token_shape[:1], token_shape):
        raise ValueError(
          f'{name}: has shape {array.shape}; must be one number per row '
          f'({token_shape[0]},), per completion token {token_shape}, or in all'
        )
      arrays[name] = array
    return arrays

  def _minibatches(
    self, rows: batch.Rows, iteration: int, epoch: int
  ) -> list[np.ndarray]:
    """Returns the row indices of each mini-batch, in random order."""
    index = np.flatnonzero(rows.real)
    if not len(index):
      raise ValueError('rows: all are padding; at least one must be real')
    rng = np.random.default_rng((self._seed, iteration, epoch))
    groups = self._packer.prompt_groups(rows, index, self._minibatch_rows)
    groups = [groups[n] for n in rng.permutation(len(groups))]
    count = math.ceil(len(index) / self._minibatch_rows)
    edges = np.cumsum([len(x) for x in np.array_split(index, count)])
    starts = np.cumsum([0, *map(len, groups)])[:-1]
    # Rows of a group belong to the mini-batch that contains the first of them.
    minibatches = np.searchsorted(edges, starts, side='right')
    return [
      np.concatenate(
        [group for group, m in zip(groups, minibatches, strict=True) if m == n]
      )
      for n in np.unique(minibatches)
    ]

  def _weights(
    self, rows: batch.Rows, minibatch: np.ndarray, trained: np.ndarray | None
  ) -> np.ndarray:
    """Returns the weight of each row's tokens; 0 outside of the mini-batch.

    With `trained`, the weight of each token, [R, C].
    """
    weights = np.zeros(len(rows.groups), np.float32)
    lengths = rows.lengths - rows.prompt_lengths
    if trained is not None:
      lengths = trained.sum(axis=1, dtype=np.int32)
    weights[minibatch] = losses.row_weights(
      lengths[minibatch], self._max_completion, self._aggregation
    )
    return weights if trained is None else weights[:, None] * trained

  def _teacher_part(
    self, given: teacher.TeacherBatch | None, n: int, count: int
  ) -> tuple[str, batch.Rows, np.ndarray, dict, np.ndarray] | None:
    """Returns the teacher's part of the n-th of `count` mini-batches.

    None without rows; then the mini-batch has the loss of RL alone.
    """
    if given is None:
      return None
    index = np.array_split(np.flatnonzero(given.rows.real), count)[n]
    if not len(index):
      return None
    weights = self._weights(given.rows, index, given.trained)
    weights *= np.float32(given.weight)
    return 'teacher', given.rows, index, dict(given.columns), weights

  def _empty_arrays(self, shape: packing.Shape, program: str) -> dict[str, Any]:
    """Returns the arrays of an empty microbatch for a program."""
    row = np.zeros(1, np.float32)
    names = self._teacher_columns if program == 'teacher' else self.columns
    packer = self._signal_packer if program == 'signals' else self._packer
    return _gather(packer.empty(shape), dict.fromkeys(names, row), row)


def _zeros(rows: batch.Rows) -> np.ndarray:
  """Returns a zero per completion token, [R, C]."""
  return np.zeros(rows.sampler_log_probs.shape, np.float32)


def _gather(
  microbatch: packing.Microbatch,
  columns: dict[str, np.ndarray],
  weights: np.ndarray,
) -> dict[str, Any]:
  """Returns the arrays of a microbatch for `LearnerPrograms`."""
  return microbatch.inputs() | {
    'columns': {name: microbatch.gather(x) for name, x in columns.items()},
    'weights': microbatch.gather(weights),
  }


def check_same_rows(*rows: batch.Rows) -> None:
  """Raises ValueError, in all processes, if their tokens or rewards differ."""
  if distributed.is_multi_process():
    sums = [each.checksum() for each in rows]
    distributed.check_same({'checksum of trained tokens and rewards': sums})


def _old_columns(
  advantages: np.ndarray, columns: dict[str, np.ndarray | None]
) -> dict[str, np.ndarray | float]:
  """Returns the columns of a call with the arguments of the last release."""
  deprecated.warn(
    'Learner.update(state, rows, advantages, ...)',
    'Learner.update(state, rows, advantages=advantages, ...)',
    stacklevel=4,
  )
  columns = {name: x for name, x in columns.items() if x is not None}
  return {'advantages': advantages, 'importance': 1.0} | columns
