"""The compiled programs of the learner: everything that runs on the devices.

The inputs of `LearnerPrograms` are arrays of packed tokens and columns, not the
rows that these come from. Each program is traced once per shape of microbatch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from gigpo_jax import mesh as mesh_lib
from gigpo_jax import packing, plugins, token_batch
from gigpo_jax.models import (
  attention,
  layer_gradients,
  lora,
  parameters,
  qwen,
)
from gigpo_jax.programs import update_sums
from gigpo_jax.runtime import compilation, distributed, errors

# Largest number of completion tokens per shard whose logits are in memory at a
# time.
_LOGITS_CHUNK = 512

# (name,) or (name, shape of the microbatch, type of the parameters).
Key = tuple[str] | tuple[str, packing.Shape, str]


def logits_chunk(room: int) -> int:
  """Returns how many tokens of a shard have their logits in memory at a time.

  Args:
    room: completion tokens that a shard of a microbatch can hold.
  """
  return min(_LOGITS_CHUNK, -(-room // 2))


@flax.struct.dataclass
class TrainState:
  """The device state that training changes.

  Attributes:
    params: trained parameters, float32; for a network with adapters, only the
      adapters.
    opt_state: state of the optimizer.
    updates: number of optimizer steps, int32; skipped updates do not count.
  """

  params: dict
  opt_state: optax.OptState
  updates: jax.Array


class LearnerPrograms:
  """Programs that compute outputs, gradients and updates of a model on a mesh.

  The arrays of a microbatch are a dict: those of `packing.Microbatch.inputs`,
  'columns', a dict of columns by name, and 'weights', the weight of each
  token in the loss. The programs are

  - init: state of the optimizer for given parameters;
  - zeros: gradients and sums of metrics before the first microbatch;
  - fill: gradients with a given value;
  - outputs: log-prob, or value, of each token;
  - signals: further outputs of a policy for each token, by name;
  - accumulate: gradients and sums of metrics, with those of a microbatch
    added;
  - teacher: the same for a teacher's rows, with their own loss;
  - apply: state and sums of metrics after an optimizer step.

  Programs that take the arrays of a microbatch exist for each of its shapes,
  and 'outputs' also for each type of parameters.

  Args:
    config: shape of the model; with a value head, its outputs are
      `token_batch.ValueOutputs`, else `token_batch.PolicyOutputs`.
    mesh: device mesh; sequences of a microbatch are sharded over `mesh.BATCH`.
    loss: see `token_batch.Loss`.
    optimizer: see `optimizer.AdamW`.
    temperature: temperature of log-probs and entropies.
    make_arrays: returns the arrays of an empty microbatch of a shape, for a
      program of a given name.
    signals: names of the outputs of 'signals': 'log_probs', 'entropies',
      'feature_squares', or 'NAME@X' for an output at X times the temperature.
      (): there is no such program.
    tree: whether rows share prompts; see `attention.Segments`.
    teacher_loss: the loss of a teacher's rows; None: there is no 'teacher'.
    scaled: whether updates are multiplied by the step scale that 'zeros' gets;
      even a scale of 1 may change their last bits.

  Attributes:
    param_shardings: shardings of the trained parameters.
    base_shardings: shardings of the frozen parameters.
    replicated: sharding of scalars.
    table: the compiled programs.
  """

  def __init__(
    self,
    config: qwen.QwenConfig,
    mesh: jax.sharding.Mesh,
    loss: token_batch.Loss,
    optimizer: optax.GradientTransformation,
    temperature: float,
    make_arrays: Callable[[packing.Shape, str], dict[str, Any]],
    *,
    signals: Sequence[str],
    tree: bool,
    scaled: bool,
    teacher_loss: token_batch.Loss | None,
  ):
    self._config, self._mesh = config, mesh
    self._tree, self._scaled = tree, scaled
    self._loss, self._optimizer = loss, optimizer
    self._teacher_loss = teacher_loss
    self._temperature = temperature
    self._make_arrays = make_arrays
    self._signals = tuple(signals)
    self._metric_names = self._find_metric_names()
    self._row_sharding = mesh_lib.batch_sharding(mesh)
    self.replicated = mesh_lib.replicated_sharding(mesh)
    shardings = mesh_lib.shardings(mesh, parameters.logical_axes(config))
    self.param_shardings, self.base_shardings = self.split(shardings)
    self._state_shardings = self._find_state_shardings()
    self._functions = self._make_functions()
    self.table = compilation.ProgramTable()

  def split(self, params: dict) -> tuple[dict, dict]:
    """Returns the trained and the frozen parameters."""
    return lora.split(params) if self._config.adapters else (params, {})

  def _param_shapes(self) -> tuple[dict, dict]:
    """Returns shapes of the trained and the frozen parameters, float32."""
    init = functools.partial(parameters.init, self._config)
    return self.split(jax.eval_shape(init, jax.random.key(0)))

  def _find_metric_names(self) -> tuple[str, ...]:
    # A shape of its own, so that a sum over an axis is noticed.
    token = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    if self._config.value_head:
      outputs = token_batch.ValueOutputs(token)
    else:
      outputs = token_batch.PolicyOutputs(token, token)
    tokens = token_batch.make(
      jax.ShapeDtypeStruct(token.shape, bool),
      jax.ShapeDtypeStruct(token.shape, jnp.int32),
      dict.fromkeys(self._loss.columns, token),
    )
    return _trace_metric_names(self._loss, outputs, tokens)

  def _find_state_shardings(self) -> TrainState:
    params, _ = self._param_shapes()
    moments = optax.tree_utils.tree_map_params(
      self._optimizer,
      lambda _, sharding: sharding,
      jax.eval_shape(self._optimizer.init, params),
      self.param_shardings,
      transform_non_params=lambda _: self.replicated,
    )
    return TrainState(self.param_shardings, moments, self.replicated)

  def _make_functions(self) -> dict[str, Any]:
    state, grads = self._state_shardings, self.param_shardings
    jit_outputs = functools.partial(jax.jit, out_shardings=self._row_sharding)
    jit_sums = functools.partial(
      jax.jit,
      donate_argnames=('grads', 'sums'),
      out_shardings=(grads, self.replicated),
    )
    return {
      'init': jax.jit(self._optimizer.init, out_shardings=state.opt_state),
      'zeros': jax.jit(
        lambda params, skipped, step_scale: (
          jax.tree.map(jnp.zeros_like, params),
          self._zero_sums(skipped, step_scale),
        ),
        out_shardings=(grads, self.replicated),
      ),
      # Separate from `apply`, which would hold two copies of the gradients.
      'fill': jax.jit(
        lambda grads, value: jax.tree.map(
          lambda x: jnp.full(x.shape, value, x.dtype), grads
        ),
        donate_argnums=0,
        keep_unused=True,
        out_shardings=grads,
      ),
      'outputs': jit_outputs(self._log_probs_or_values),
      'signals': jit_outputs(self._further_outputs),
      'accumulate': jit_sums(self._accumulate),
      'teacher': jit_sums(self._accumulate_teacher),
      'apply': jax.jit(
        self._apply,
        donate_argnames=('state', 'sums'),
        out_shardings=(state, self.replicated),
      ),
    }

  def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a program."""
    key: Key = (name,)
    if name in ('outputs', 'signals', 'accumulate', 'teacher'):
      params, _, arrays = args
      shape = packing.Shape(*arrays['tokens'].shape)
      key = (name, shape, _dtype(params))
    lower = functools.partial(self._lower, *key)
    return distributed.block_on_cpu(self.table.run(key, lower, *args, **kwargs))

  def abstract_state(self) -> tuple[TrainState, dict]:
    """Returns shapes, dtypes and shardings of a state and of the base."""
    params, base = self._param_shapes()
    base = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, self._config.dtype), base
    )
    state = TrainState(
      params,
      jax.eval_shape(self._optimizer.init, params),
      jax.ShapeDtypeStruct((), jnp.int32),
    )
    return (
      mesh_lib.with_shardings(state, self._state_shardings),
      mesh_lib.with_shardings(base, self.base_shardings),
    )

  def _abstract_params(self, dtype: str) -> dict:
    """Returns shapes and shardings of parameters in a type; {} for ''."""
    params = self.abstract_state()[0].params if dtype else {}
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding),
      params,
    )

  def abstract_reference(self) -> dict:
    """Returns shapes, dtypes and shardings of the reference's parameters.

    With adapters, these are {}: the frozen parameters are the reference.
    """
    dtype = '' if self._config.adapters else self._config.dtype
    return self._abstract_params(dtype)

  def lowerings(
    self,
    shapes: Sequence[packing.Shape],
    output_shapes: Sequence[packing.Shape],
    *,
    reference: bool,
  ) -> dict[Key, compilation.Lowering]:
    """Returns functions that lower all programs, by key.

    A key is (name,) or (name, shape, type of the parameters). The first state
    needs 'init'; the others follow from slow to fast.

    Args:
      shapes: the shapes of microbatches of updates.
      output_shapes: those of microbatches whose outputs are computed.
      reference: whether there is a reference policy.
    """
    params = [self.abstract_state()[0].params]
    if reference:
      params.append(self.abstract_reference())
    dtypes = list(dict.fromkeys(map(_dtype, params)))
    keys: list[Key] = [
      ('init',),
      *(
        (name, shape, dtypes[0])
        for name in ('accumulate', 'teacher')[: 1 + bool(self._teacher_loss)]
        for shape in shapes
      ),
      *(
        ('outputs', shape, dtype) for dtype in dtypes for shape in output_shapes
      ),
      *(
        ('signals', shape, dtypes[0])
        for shape in (output_shapes if self._signals else ())
      ),
      *((name,) for name in ('apply', 'zeros', 'fill')),
    ]
    return {key: functools.partial(self._lower, *key) for key in keys}

  def _lower(
    self, name: str, shape: packing.Shape | None = None, dtype: str = ''
  ) -> jax.stages.Lowered:
    """Lowers a program from shapes.

    Args:
      name: name of the program.
      shape: shape of the microbatch.
      dtype: type of the parameters; '' for a network without its adapters.
    """

    def with_sharding(tree, sharding):
      shardings = jax.tree.map(lambda _: sharding, tree)
      return mesh_lib.with_shardings(tree, shardings)

    state, base = self.abstract_state()
    grads, scalar = state.params, jax.ShapeDtypeStruct((), jnp.float32)
    sums = with_sharding(
      jax.eval_shape(self._zero_sums, scalar, scalar), self.replicated
    )
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    if shape:
      arrays = with_sharding(self._make_arrays(shape, name), self._row_sharding)
      args = self._abstract_params(dtype), base, arrays
    if name in ('outputs', 'signals'):
      del arrays['columns'], arrays['weights']
    elif name in ('accumulate', 'teacher'):
      kwargs = {'grads': grads, 'sums': sums}
    elif name == 'apply':
      kwargs = {'state': state, 'grads': grads, 'sums': sums}
    elif name == 'init':
      args = (state.params,)
    else:
      args = (grads, scalar, scalar) if name == 'zeros' else (grads, scalar)
    with jax.set_mesh(self._mesh):
      return self._functions[name].lower(*args, **kwargs)

  # Traced once per shape of microbatch.

  def _hidden(
    self, params, base, arrays, grad_accumulators=None
  ) -> tuple[qwen.QwenConfig, dict, jax.Array]:
    """Returns the network, its parameters and its hidden states."""
    config = self._config
    if config.adapters and not params:
      config = dataclasses.replace(config, adapters=None)
    params = lora.combine(base, params) if base else params
    layer_accumulators = None
    if grad_accumulators is not None:
      layer_accumulators = grad_accumulators['layers']
      others = {
        name: grad_accumulators[name] for name in params if name != 'layers'
      }
      params |= layer_gradients.accumulate_gradients(
        {name: params[name] for name in others}, others
      )
    hidden_SND = qwen.hidden_states(
      config,
      params,
      arrays['tokens'],
      arrays['positions'],
      attention.Segments(arrays['ends'], tree=self._tree),
      arrays['before'],
      agents_BL=arrays.get('agents'),
      sums=layer_accumulators,
    )
    return config, params, hidden_SND

  def _policy_outputs(
    self, config, params, hidden_SND, arrays, factor=1.0
  ) -> token_batch.PolicyOutputs:
    """Returns the outputs at a multiple of the temperature."""
    log_probs, entropies = qwen.token_log_probs(
      config,
      params,
      hidden_SND,
      arrays['targets'],
      count=jnp.max(jnp.sum(arrays['mask'], axis=1)),
      temperature=self._temperature * factor,
      chunk=logits_chunk(arrays['targets'].shape[1]),
    )
    return token_batch.PolicyOutputs(log_probs, entropies)

  def _forward(
    self, params, base, arrays, grad_accumulators=None
  ) -> token_batch.PolicyOutputs | token_batch.ValueOutputs:
    config, params, hidden_SND = self._hidden(
      params, base, arrays, grad_accumulators
    )
    if config.value_head:
      return token_batch.ValueOutputs(qwen.values(params, hidden_SND))
    return self._policy_outputs(config, params, hidden_SND, arrays)

  def _log_probs_or_values(self, params, base, arrays):
    outputs = self._forward(params, base, arrays)
    return outputs.values if self._config.value_head else outputs.log_probs

  def _further_outputs(self, params, base, arrays):
    hidden = self._hidden(params, base, arrays)

    @functools.cache
    def outputs_at(factor: float) -> dict[str, jax.Array]:
      outputs = self._policy_outputs(*hidden, arrays, factor)
      features_SND = hidden[-1].astype(jnp.float32)
      features_SND /= self._temperature * factor
      squares_SN = jnp.sum(jnp.square(features_SND), axis=-1)
      return vars(outputs) | {'feature_squares': squares_SN}

    results = {}
    for signal in self._signals:
      name, _, factor = signal.partition('@')
      results[signal] = outputs_at(float(factor or 1))[name]
    return results

  def _accumulate(self, params, base, arrays, *, grads, sums):
    total, metrics, grads = self._add_gradients(
      self._loss, params, base, arrays, grads
    )
    return grads, sums.add(metrics, _trained(arrays), total)

  def _accumulate_teacher(self, params, base, arrays, *, grads, sums):
    total, metrics, grads = self._add_gradients(
      self._teacher_loss, params, base, arrays, grads
    )
    losses = {'teacher/loss': metrics['loss/total']}
    return grads, sums.add(
      losses, _trained(arrays), total, count='teacher/tokens'
    )

  def _add_gradients(self, loss_fn, params, base, arrays, grads):
    """Returns the weighted loss, metrics of tokens, and all gradients."""
    mask = arrays['mask']
    tokens = token_batch.make(mask, arrays['row_ids'], arrays['columns'])
    in_place = qwen.adds_in_place(self._config)

    def loss_of(params):
      outputs = self._forward(
        params, base, arrays, grad_accumulators=grads if in_place else None
      )
      loss, metrics = loss_fn(outputs, tokens)
      loss = jnp.where(mask, loss, 0)
      total = jnp.sum(loss * arrays['weights'])
      return total, metrics | {'loss/total': loss}

    (total, metrics), new_grads = jax.value_and_grad(loss_of, has_aux=True)(
      params
    )
    grads = new_grads if in_place else jax.tree.map(jnp.add, grads, new_grads)
    return total, metrics, grads

  def _apply(self, *, state, grads, sums):
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.objective)

    def step(state, grads):
      parameter_updates, opt_state = self._optimizer.update(
        grads, state.opt_state, state.params
      )
      if sums.step_scale is not None:
        parameter_updates = jax.tree.map(
          lambda x: x * sums.step_scale, parameter_updates
        )
      params = optax.apply_updates(state.params, parameter_updates)
      return TrainState(params, opt_state, state.updates + 1)

    # `jnp.where` on each element would keep the old state next to the new.
    state = jax.lax.cond(finite, step, lambda state, _: state, state, grads)
    return state, sums.end_update(finite, norm)

  def _zero_sums(
    self, skipped: jax.Array, step_scale: jax.Array
  ) -> update_sums.UpdateSums:
    names = [*self._metric_names, 'loss/total', 'update/tokens']
    if self._teacher_loss:
      names += ['teacher/loss', 'teacher/tokens']
    return update_sums.zeros(
      names, skipped, step_scale if self._scaled else None
    )


def _trace_metric_names(
  loss: token_batch.Loss,
  outputs: token_batch.PolicyOutputs | token_batch.ValueOutputs,
  tokens: token_batch.TokenBatch,
) -> tuple[str, ...]:
  """Returns the names of a loss's metrics; compiles nothing.

  Args:
    loss: the loss, whose results are checked.
    outputs: shapes of the model's outputs.
    tokens: shapes of the tokens.

  Raises:
    ValueError: in one line, if the loss returns something else than a loss and
      metrics of each token.
  """
  names: list[str] = []

  def call(*args: Any) -> None:
    with errors.show_traceback('loss.name'):
      result = loss(*args)
    names.extend(_check_result(result, tokens.mask.shape))

  jax.eval_shape(call, outputs, tokens)
  return tuple(names)


def _check_result(result: Any, shape: tuple[int, ...]) -> list[str]:
  """Returns the names of the metrics that a loss returned.

  Raises:
    ValueError: in one line, if it returned something else.
  """
  match result:
    case loss, dict(metrics):
      pass
    case _:
      raise ValueError(
        f'loss.name: returned {_describe(result)}; must return (loss of each '
        'token, dict of metrics)'
      )
  plugins.check_metric_names('loss.name', metrics)
  for name, values in {'a loss': loss, **metrics}.items():
    if getattr(values, 'shape', None) != shape:
      raise ValueError(
        f'loss.name: returned {name}, {_describe(values)}, for a mask of shape '
        f'{shape}; must be an array of the shape of the mask, one value per '
        'token'
      )
  return [*metrics]


def _describe(value: Any) -> str:
  """Returns the type of a value, and the shape of an array."""
  if isinstance(value, jax.Array):
    return f'an array of shape {value.shape}'
  if isinstance(value, tuple):
    return f'a tuple of ({", ".join(map(_describe, value))})'
  return f'a {type(value).__name__}'


def _trained(arrays: dict[str, Any]) -> jax.Array:
  """Returns True for the tokens of a microbatch that have a weight."""
  return arrays['mask'] & (arrays['weights'] > 0)


def _dtype(params: dict) -> str:
  """Returns the type of parameters; '' if there are none."""
  return next((str(x.dtype) for x in jax.tree.leaves(params)), '')
