"""Checks of the model of a config before any device starts.

For a model on the hub, only config.json is downloaded until everything else is
valid.
"""

import pathlib
import reprlib
from collections.abc import Iterator

import jax
import ml_collections
import psutil

import configs
import envs
from configs import sizes
from gigpo_jax import (
  algorithms,
  conversation,
  forced_prefixes,
  models,
  optimizer,
  tokenizer,
)
from gigpo_jax.models import (
  decode_attention,
  huggingface,
  kv_cache,
  lora,
  parameters,
  published,
  qwen,
)
from gigpo_jax.runtime import hardware

# float32 parameters, two AdamW moments and a gradient accumulator, and one bf16
# copy each for sampling and for computing. With adapters only the bf16 copies.
BYTES_PER_PARAMETER = 16 + 2 + 2
FROZEN_BYTES_PER_PARAMETER = 2 + 2
# float32 as loaded, and a bf16 copy for sampling.
_SAMPLING_BYTES_PER_PARAMETER = 4 + 2


def problems(
  config: ml_collections.ConfigDict, *, trains: bool, fetch: bool
) -> Iterator[str]:
  """Yields problems of the model.

  Args:
    config: the experiment.
    trains: whether the model is trained.
    fetch: whether to download the weights of a hub model, which takes long; its
      config.json is always downloaded.
  """
  if missing := _missing_warm_start(config):
    yield missing
    return
  path = config.model.path
  try:
    if not path:
      raise ValueError(
        f'model.path={path}: no weights; set --config.model.path to a Hugging '
        'Face folder, or to a name on the hub such as '
        'Qwen/Qwen2.5-1.5B-Instruct'
      )
    on_hub = _on_hub(path)
    directory = (
      huggingface.download(path, only_config=True)
      if on_hub
      else model_directory(path)
    )
    model = huggingface.read_config(directory, dtype=config.model.dtype)
  except ValueError as error:
    if path and (policy := _policy_in(pathlib.Path(path))):
      yield f'model.path={path}: a folder of a run; must be {policy}'
      return
    yield str(error)
    if model := _published(config):
      yield from _too_small(config, models.num_parameters(model), trains)
    return
  lines = [] if on_hub else list(_invalid_files(config, model))
  if not lines:
    lines += _too_long(config, model)
    lines += _no_kernel(config, model)
    lines += _no_parameter(config, model) if trains else []
    lines += _too_high_rank(config, model)
    lines += _too_small(config, models.num_parameters(model), trains)
  if on_hub and fetch and not lines:
    lines += _invalid_files(config, model)
  yield from lines


def _policy_in(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the policy of a run, or of the last round of `sft.rounds`."""
  rounds = sorted(
    folder.glob('round-*/policy'),
    key=lambda policy: (len(policy.parent.name), policy),
  )
  policies = [folder / 'policy', *reversed(rounds)]
  return next((policy for policy in policies if policy.is_dir()), None)


def _invalid_files(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields problems of the weights and the tokenizer of a model."""
  try:
    directory = model_directory(config.model.path)
    huggingface.check(directory, model)
    text = tokenizer.Tokenizer(directory)
  except ValueError as error:
    yield str(error)
    return
  if text.vocab_size > model.vocab_size:
    yield (
      f'model.path={config.model.path}: its tokenizer has {text.vocab_size} '
      f'tokens, but its embedding only {model.vocab_size} rows'
    )
  yield from _no_conversations(config, text)
  limit, template = config.rollout.max_prompt_tokens, text.template_tokens()
  if limit <= template:
    yield (
      f'rollout.max_prompt_tokens={limit}: the chat template alone takes '
      f'{template} tokens; must be larger'
    )
  yield from _unusable_prefixes(config, text)


def _unusable_prefixes(
  config: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> Iterator[str]:
  """Yields problems of forced prefixes."""
  limit, template = config.rollout.max_prompt_tokens, text.template_tokens()
  texts = config.rollout.prefixes
  forced = forced_prefixes.make(texts, config.rollout.forced_members, text)
  if not forced.longest:
    return
  if forced.longest + template >= limit:
    yield (
      f'rollout.prefixes={reprlib.repr(tuple(texts))}: the longest has '
      f'{forced.longest} tokens, the chat template {template}; must leave room '
      f'for a prompt in rollout.max_prompt_tokens={limit}'
    )
  unknown = forced_prefixes.unrecognized(forced, text)
  if unknown and algorithms.reads_prefixes(
    algorithms.of_section(config.algorithm.to_dict())
  ):
    yield (
      f'rollout.prefixes={reprlib.repr(tuple(texts))}: responses are decoded '
      f'without special tokens, so {config.algorithm.name} does not recognize '
      f'{reprlib.repr(unknown[0])} in them; must be plain texts'
    )


def _no_conversations(
  config: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> Iterator[str]:
  """Yields a problem if the chat template does not support conversations."""
  if config.env.get('context') != 'conversation':
    return
  try:
    conversation.Conversations(text, 0, 'end').check(
      has_tools=envs.uses_tools(config.env.name, config.env)
    )
  except tokenizer.TemplateError as error:
    yield f'model.path={config.model.path}: {error}'


def _published(config: ml_collections.ConfigDict) -> qwen.QwenConfig | None:
  """Returns the published shape of a model by its name, else by its size.

  The size is that of the config's variant, such as 1.5b.
  """
  name = (config.model.path or '').rstrip('/').rpartition('/')[2]
  size = config.get('variant', '').partition(',')[0]
  return published.find(name) or published.find(f'Qwen2.5-{size}')


def _too_long(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields a problem if prompt and completion exceed the model's positions."""
  limit = model.max_positions
  if model.yarn:
    # Some config.json files list the positions before YaRN scaling.
    scaled = model.yarn.factor * model.yarn.original_length
    limit = max(limit, int(scaled))
  prompt = config.rollout.max_prompt_tokens
  completion = config.rollout.max_completion_tokens
  if prompt + completion > limit:
    yield (
      f'rollout.max_prompt_tokens={prompt}: with rollout.max_completion_tokens='
      f'{completion} above max_position_embeddings={limit} of model.path='
      f'{config.model.path}; together must be at most that'
    )


def _no_kernel(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields problems of kernels and of the cache."""
  size, kernel = model.head_dim, config.model.decode_attention
  if problem := decode_attention.head_problem(kernel, size):
    yield (
      f'model.decode_attention={kernel}: the heads of model.path='
      f'{config.model.path} have size {size}; {problem}'
    )
  if model.window and kernel in decode_attention.PLATFORMS:
    yield (
      f'model.decode_attention={kernel}: has no sliding window, which '
      f'model.path={config.model.path} needs; must be xla'
    )
  drafted = kv_cache.draft_problem(model, config.rollout.draft_tokens)
  if problem := drafted or kv_cache.reuse_problem(
    model, config.rollout.reuse_cache
  ):
    yield problem


def _no_parameter(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields a problem if optimizer.no_decay matches no parameter."""
  words = config.optimizer.no_decay
  if not words or config.lora.rank:  # Adapters have neither norms nor biases.
    return
  decays = optimizer.AdamW(**config.optimizer).decays(models.shapes(model))
  if all(jax.tree.leaves(decays)):
    yield (
      f'optimizer.no_decay={tuple(words)}: no parameter has these words in its '
      'name; must be parts of names such as layers.norm.mlp, or ()'
    )


def _too_high_rank(
  config: ml_collections.ConfigDict, model: qwen.QwenConfig
) -> Iterator[str]:
  """Yields a problem if every adapter would exceed the rank of its matrix."""
  rank = config.lora.rank
  limit = parameters.max_rank(model, lora.Lora(**config.lora))
  if rank > limit:
    yield (
      f'lora.rank={rank}: the matrices of lora.targets in model.path='
      f'{config.model.path} have ranks up to {limit}; must be at most that'
    )


def _missing_warm_start(config: ml_collections.ConfigDict) -> str | None:
  """Returns the problem of a small config without its warm start, or None."""
  path = config.model.path or ''
  if match := sizes.WARM_START.fullmatch(path):
    if configs.find(path):
      return None
    name, size = match.groups()
    if not envs.has_expert(config.env.name):
      return (
        f'model.path={path}: no such warm start yet, and env.name='
        f'{config.env.name} has no expert to imitate; the header of '
        f'configs/{name}.py says how to make one'
      )
    return (
      f'model.path={path}: no such warm start yet; run `python launch/sft.py '
      f'--config=configs/{name}.py:{size}`, then this command again'
    )
  if not path and config.sft.init == 'scratch':
    return (
      'model.path=None: no weights; run `python launch/sft.py` with this '
      '--config, and set --config.model.path to the folder policy in its '
      '--workdir, or to another Hugging Face folder'
    )
  return None


def _too_small(
  config: ml_collections.ConfigDict, num_parameters: int, trains: bool
) -> Iterator[str]:
  # An accelerator's memory is known only after it starts; out-of-memory errors
  # are reported then.
  if hardware.has_accelerator():
    return
  bytes_per_parameter, mode = BYTES_PER_PARAMETER, 'full training'
  if not trains:
    bytes_per_parameter, mode = _SAMPLING_BYTES_PER_PARAMETER, 'sampling'
  elif config.lora.rank:
    bytes_per_parameter, mode = FROZEN_BYTES_PER_PARAMETER, 'training adapters'
  elif config.optimizer.mu_dtype == 'bfloat16':
    bytes_per_parameter -= 2
  if trains and algorithms.of_section(config.algorithm).needs_values:
    # float32 parameters, moments and gradients of the critic; with adapters,
    # its frozen bf16 copy.
    bytes_per_parameter += 2 if config.lora.rank else 16
    mode = f'{mode}, with a critic,'
  needed = num_parameters * bytes_per_parameter
  available = psutil.virtual_memory().total
  if needed > available:
    yield (
      f'memory={available / 2**30:.0f} GiB: {mode} of '
      f'{num_parameters / 1e9:.1f}B parameters needs about '
      f'{needed / 2**30:.0f} GiB; use a larger machine or a smaller model'
    )


def model_directory(path: str) -> str:
  """Returns the local folder of a model, downloading it if necessary.

  Paths within the project work from any working directory. A path that is no
  folder but looks like a name on the Hugging Face hub is looked up in the hub's
  cache, then downloaded.

  Raises:
    ValueError: in one line, if the model is not on the hub, or the hub is not
      reachable.
  """
  if _on_hub(path):
    return huggingface.download(path)
  return configs.find(path) or path


def _on_hub(path: str | None) -> bool:
  """Returns whether a model path can only be a name on the hub."""
  return bool(path) and huggingface.is_hub_name(path) and not configs.find(path)
