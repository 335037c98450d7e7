"""Every field with its default, unit and origin; experiments change a few.

"Paper" is GiGPO, arXiv:2505.10978, tables of hyper-parameters; "code" is its
authors' release. A path left empty is asked for at start.
"""

import difflib
import functools
import importlib
import pathlib
import re
from collections.abc import Mapping, Sequence

import ml_collections
from ml_collections import config_dict

import configs


def parse_variants(
  arg: str, name: str, *, sizes: Sequence[str], changes: Sequence[str]
) -> tuple[str, list[str]]:
  """Returns (size or '', other variants) of `--config=configs/NAME.py:ARG`.

  Raises:
    ValueError: if `arg` holds anything else, or two sizes.
  """
  variants = [word for word in arg.split(',') if word]
  known = (*sizes, *changes)
  unknown = [v for v in variants if v not in known]
  chosen = [v for v in variants if v in sizes]
  if unknown or len(chosen) > 1:
    near = [m for v in unknown for m in difflib.get_close_matches(v, known, 1)]
    hint = f'; did you mean {", ".join(near)}?' if near else ''
    raise ValueError(
      f'--config=configs/{name}.py:{arg}: accepts at most one of '
      f'{", ".join(sizes)} and {", ".join(changes)}, joined by commas{hint}'
    )
  return ''.join(chosen), [b for b in changes if b in variants]


# Variants of every experiment: an algorithm, or a way to run one.
ALGORITHMS = tuple(
  sorted(
    path.stem
    for path in pathlib.Path(__file__)
    .parents[1]
    .glob('gigpo_jax/algorithms/*.py')
    if path.stem not in ('__init__', 'gigpo')
  )
)
# Warm starts that come with the project.
INCLUDED = 'configs/warm_starts'
# Learning rate of `:mini` for methods without one of their own.
MINI_RATE = 7.5e-5
# Environments whose anchors can have the admissible actions in them.
ANCHORED = ('alfworld', 'webshop')
PRESETS = ('paper', 'reference_code', 'strong')
CHANGES = (*PRESETS, *ALGORITHMS, 'lora')
# Algorithms of the paper's released code, for `reference_code`.
RELEASED = (
  'gigpo',
  'grpo',
  'ppo',
  'reinforce_pp',
  'reinforce_pp_baseline',
  'rloo',
)


def apply(config: ml_collections.ConfigDict, changes: Sequence[str]) -> None:
  """Makes changes of CHANGES.

  Raises:
    ValueError: if two of them are algorithms, or presets, or if the released
      code does not implement the algorithm that `reference_code` is to run.
  """
  for names, what in ((ALGORITHMS, 'algorithm'), (PRESETS, 'preset')):
    chosen = [change for change in changes if change in names]
    if len(chosen) > 1:
      raise ValueError(
        f'--config=...:{",".join(chosen)}: there is one {what}; accepts at '
        'most one of these'
      )
  algorithm = next((c for c in changes if c in ALGORITHMS), 'gigpo')
  if 'reference_code' in changes and algorithm not in RELEASED:
    raise ValueError(
      f'--config=...:reference_code,{algorithm}: the released code has no '
      f'{algorithm}; reference_code accepts {", ".join(RELEASED)}'
    )
  for change in changes:
    if change in ALGORITHMS:
      use_algorithm(config, change)
    else:
      {
        'paper': use_paper,
        'reference_code': functools.partial(
          use_reference_code, algorithm=algorithm
        ),
        'strong': use_strong,
        'lora': use_adapters,
      }[change](config)


def use_algorithm(config: ml_collections.ConfigDict, name: str) -> None:
  """Compares with another algorithm on as many episodes."""
  config.algorithm.name = name
  # Options of its own that are not among those below.
  for option, default in _options(name).items():
    if option not in config.algorithm:
      config.algorithm[option] = default
  if name == 'dr_grpo':
    config.loss.aggregation = 'fixed_length'
  if name == 'ppo':
    # Nothing is compared within a task: as many tasks as there are episodes.
    config.rollout.groups *= config.rollout.episodes_per_group
    config.rollout.episodes_per_group = 1


def _options(algorithm: str) -> dict[str, object]:
  """Returns the options of an algorithm and their defaults."""
  # Slow to import.
  from gigpo_jax import algorithms

  module = importlib.import_module(f'gigpo_jax.algorithms.{algorithm}')
  return algorithms.defaults(module.Algorithm)


def use_paper(config: ml_collections.ConfigDict) -> None:
  """Leaves out what the paper does not have."""
  config.loss.entropy_weight = 0.0


def use_reference_code(
  config: ml_collections.ConfigDict, algorithm: str
) -> None:
  """Computes as the paper's released code, to compare with its results.

  Args:
    config: to change.
    algorithm: of RELEASED; of the options below it gets those that it has.
  """
  known = _options(algorithm)
  for option, value in {
    'episode_stats': 'rows',
    'penalty_scope': 'row',
    'lone_episode': 'raw',
  }.items():
    if option in known:
      config.algorithm[option] = value
  config.loss.dual_clip = 3.0
  config.loss.kl_clamp = 10.0
  if 'reference_sampling' in config.env:
    # Its validation goals are among those that it trains on.
    config.env.reference_sampling = True
    # As many as it validates on; 0 is all.
    config.evaluation.num_tasks = min(config.evaluation.num_tasks or 128, 128)


def use_strong(config: ml_collections.ConfigDict) -> None:
  """Is what the one controlled study found best (arXiv:2602.21534, SAMPO).

  On ALFWorld 92.7 % there, beside GiGPO's 81.1 % and GRPO's 62.4 %.
  """
  if config.env.name in ANCHORED:
    config.algorithm.anchor = 'observation_and_actions'
  config.loss.ratio_level = 'row'
  config.loss.clip_epsilon = 3e-3
  config.loss.clip_epsilon_high = 4e-3
  config.loss.aggregation = 'sequence_mean'
  config.filter.without_spread = True
  config.filter.warmup_iterations = 10


def use_adapters(config: ml_collections.ConfigDict) -> None:
  """Trains adapters instead of the model, at a rate that suits them."""
  config.lora.rank = 32
  # Merged into bfloat16 matrices they would be rounded away at first.
  config.rollout.weights = 'adapters'
  config.optimizer.learning_rate *= 10


def use_tiny_policy(config: ml_collections.ConfigDict) -> None:
  """Trains a 0.6M-parameter policy, made by launch/sft.py, on two CPU cores."""
  config.model.dtype = 'float32'
  config.model.remat = 'none'
  config.env.prompt_style = 'brief'
  config.pool.num_workers = 1
  config.rollout.groups = 8
  config.rollout.episodes_per_group = 8
  # Few, as each takes seconds to compile; derived from the limits of tokens,
  # which an environment's own config sets.
  config.rollout.max_prompt_tokens = 512
  config.rollout.max_completion_tokens = 64
  config.rollout.prompt_buckets = ()
  config.rollout.batch_buckets = (16, 64)
  config.learner.length_buckets = ()
  config.loss.kl_weight = 0.0
  config.loss.entropy_weight = 0.0
  config.optimizer.learning_rate = 2e-4
  config.learner.minibatch_rows = 256
  config.learner.microbatch_rows = 16
  config.evaluation.num_tasks = 256
  # The policy as it samples in training; the paper's 0.4 flatters the start.
  config.evaluation.temperature = 1.0
  config.sft.init = 'scratch'
  # Learning the prompts too is what teaches so small a policy to copy.
  config.sft.completion_only = False
  config.sft.learning_rate = 3e-3
  config.sft.warmup_updates = 50
  config.sft.minibatch_rows = 16
  config.sft.model.layers = 3
  config.sft.model.width = 128
  config.sft.model.heads = 4
  config.sft.model.kv_heads = 4
  config.sft.model.mlp = 256


# Where launch/sft.py writes the warm start of `configs/NAME.py:SIZE`.
WARM_START = re.compile(r'runs/(\w+)-(\w+)-sft/policy')


def warm_start(file: str, size: str) -> str:
  """Returns the path of the warm start of a small size.

  That is where `launch/sft.py --config=FILE:SIZE` writes it by default. If
  nothing is there, but the project includes a warm start, the path of that.

  Args:
    file: the config file.
    size: a small variant, such as 'tiny'.
  """
  name = pathlib.Path(file).stem
  own, included = f'runs/{name}-{size}-sft/policy', f'{INCLUDED}/{name}_tiny'
  if not configs.find(own) and configs.find(included):
    return included
  return own


def use_mini(
  config: ml_collections.ConfigDict,
  changes: Sequence[str],
  rates: Mapping[str, float],
) -> None:
  """Cuts the tiny path to about five minutes of one core.

  Args:
    config: of the tiny path.
    changes: variants besides the size.
    rates: learning rate of a method, found by configs/sweeps/tuning.py; of all
      methods that it does not name MINI_RATE.
  """
  methods = [c for c in changes if c in (*ALGORITHMS, 'strong')] or ['gigpo']
  config.optimizer.learning_rate = min(
    rates.get(method, MINI_RATE) for method in methods
  )
  config.rollout.groups = 2
  config.rollout.batch_buckets = (16,)
  # As many updates in an iteration.
  config.learner.minibatch_rows = 64
  # In float32 on a CPU they are the learner's, and need not be computed again.
  config.loss.old_log_probs = 'sampler'
  config.evaluation.num_tasks = 128


def use_smoke(config: ml_collections.ConfigDict) -> None:
  """Cuts warm start and run to a minute or two."""
  config.num_iterations = 2
  config.rollout.groups = 4
  config.rollout.episodes_per_group = 4
  config.rollout.batch_buckets = (16,)
  config.evaluation.num_tasks = 16
  config.evaluation.every = 2
  config.checkpoint.every = 1
  config.sft.num_episodes = 200


def get_config() -> ml_collections.ConfigDict:  # noqa: PLR0915  (a list)
  """Returns the defaults that all experiments share."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  # Iterations: collect G x N episodes, then one pass of updates (paper: 150).
  config.num_iterations = 150

  config.model = ml_collections.ConfigDict()
  # Hugging Face directory (config.json, *.safetensors, tokenizer), or a name
  # on the hub: organisation/name or organisation/name@revision.
  config.model.path = config_dict.placeholder(str)
  # Compute type; parameters and optimizer state stay float32.
  config.model.dtype = 'bfloat16'
  # What the backward pass computes again: none, matrices (all but products
  # with parameters) or layer (all of it): memory for time.
  config.model.remat = 'layer'
  # Among a row's tokens: xla, splash (TPU), cudnn (NVIDIA), auto.
  config.model.attention = 'auto'
  # Template switch of models that think by default (Qwen3).
  config.model.enable_thinking = False

  config.env = ml_collections.ConfigDict()
  config.env.name = config_dict.placeholder(str)

  config.pool = ml_collections.ConfigDict()
  # Environments alive at once; 0: one per episode of an iteration.
  config.pool.num_envs = 0
  # Worker processes; 0 runs environments in this process (debugging).
  config.pool.num_workers = 2
  config.pool.step_timeout_secs = 60.0
  config.pool.reset_timeout_secs = 300.0
  # Resets after which a worker is replaced, its episodes played again up to
  # where they were; 0: never.
  config.pool.max_resets_per_worker = 0
  # Memory with which it is; 0: any.
  config.pool.max_worker_mib = 0
  # Share of the episodes of an iteration, or of an evaluation, that may fail;
  # with more the run stops.
  config.pool.max_failed_share = 0.25

  config.mesh = ml_collections.ConfigDict()
  # Devices per axis; -1: all that remain.
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.mesh.expert = 1
  config.mesh.sequence = 1
  config.mesh.tensor = 1

  config.rollout = ml_collections.ConfigDict()
  config.rollout.groups = 16  # G; paper
  config.rollout.episodes_per_group = 8  # N; paper
  config.rollout.max_prompt_tokens = 2048  # paper, ALFWorld
  config.rollout.max_completion_tokens = 512  # paper
  # error | drop_history | truncate_left, for prompts over the limit.
  config.rollout.prompt_overflow = 'drop_history'
  # Most turns of an episode, from an iteration on: ((0, 10), (50, 20)); (): as
  # many as the environment has.
  config.rollout.horizon = ()
  config.rollout.temperature = 1.0  # paper
  config.rollout.top_p = 1.0  # paper
  config.rollout.top_k = 0  # 0: off
  # Least probability of a token as a share of the likeliest one's; 0: off.
  config.rollout.min_p = 0.0
  # Whether `</action>` (search QA: `</search>`, `</answer>`) ends a response,
  # rather than the model's own end.
  config.rollout.stop_at_action = False
  # async: every episode goes on by itself; lockstep: all wait for the last.
  config.rollout.schedule = 'async'
  # Weights while sampling. model: in model.dtype, adapters of lora merged into
  # them, which rounds small ones away; adapters: in model.dtype, adapters
  # beside them, exact and slower; int8: half of bfloat16. How far the sampler
  # is from the learner, sampler/... in the metrics tells.
  config.rollout.weights = 'model'
  # Devices over which sampling cuts a copy of the model; 0: mesh.tensor, or
  # more where a device's memory asks for it. Copies that keep within a host
  # let each host sample by itself.
  config.rollout.tensor = 0
  # Tokens decoded between two looks at what is finished.
  config.rollout.decode_tokens = 8
  # Sizes that the sampler is compiled for. Prompt buckets are those below
  # max_prompt_tokens and that limit itself; () is half of the limit and the
  # limit. The last of batch_buckets is the number of slots, requests that are
  # decoded at once.
  config.rollout.prompt_buckets = (512, 1024, 2048)
  config.rollout.batch_buckets = (32, 128)

  # Which training tasks are played. epochs: all, one after another; uncertain:
  # rather those that succeed now and then, with a share of even chances.
  config.tasks = ml_collections.ConfigDict()
  config.tasks.draw = 'epochs'
  config.tasks.uniform = 0.5

  # Whether groups whose episodes all got the same reward are dropped, from an
  # iteration on, and how often as many are played again (DAPO).
  config.filter = ml_collections.ConfigDict()
  config.filter.without_spread = False
  config.filter.warmup_iterations = 0
  config.filter.max_refills = 2

  config.algorithm = ml_collections.ConfigDict()
  config.algorithm.name = 'gigpo'
  config.algorithm.discount = 0.95  # gamma; paper
  config.algorithm.step_weight = 1.0  # omega; paper
  config.algorithm.invalid_penalty = 0.1  # paper
  # mean_std | mean | leave_one_out; of those that compare within a group, but
  # for rloo, dr_grpo and gdpo, which are a norm.
  config.algorithm.norm = 'mean_std'
  config.algorithm.episode_stats = 'trajectories'  # | rows (code)
  config.algorithm.penalty_scope = 'reward'  # | row (code)
  config.algorithm.lone_episode = 'zero'  # | raw (code)
  # observation (code) | observation_and_actions | similarity | turn
  config.algorithm.anchor = 'observation'
  # Ratcliff-Obershelp ratio from which two anchors are one, for similarity.
  config.algorithm.similarity_threshold = 0.9
  # Anchors before a step's own that have to be equal, too.
  config.algorithm.anchor_history = 0
  # hgpo: anchors before a step's own that are looked at, weight of level k as
  # (k + 1) ** level_exponent, and of the episode's advantage.
  config.algorithm.history = 2
  config.algorithm.level_exponent = 1.0
  config.algorithm.episode_weight = 0.0
  # graphgpo: of each step that is left to success.
  config.algorithm.graph_discount = 0.1
  # gdpo: parts of the reward, of batch.COMPONENTS or what the environment
  # tells of its steps; weights, () is 1 each.
  config.algorithm.components = ('reward', 'valid')
  config.algorithm.component_weights = ()
  # ppo: links of the chain that advantages are estimated along, token | turn.
  config.algorithm.gae_level = 'token'
  config.algorithm.gae_discount = 1.0  # paper
  config.algorithm.gae_lambda = 1.0  # paper
  config.algorithm.whiten_advantages = True

  # ppo's critic: the policy's network with a value for each token.
  config.critic = ml_collections.ConfigDict()
  # Its learning rate, in those of the policy; paper: 1e-5 beside 1e-6.
  config.critic.rate_ratio = 10.0
  config.critic.value_clip = 0.5  # code; how far an update may move a value
  # Iterations in which nothing but the critic learns.
  config.critic.warmup_iterations = 0

  config.loss = ml_collections.ConfigDict()
  # token | row: each token's ratio, or its row's, their geometric mean (GSPO).
  config.loss.ratio_level = 'token'
  config.loss.clip_epsilon = 0.2  # code
  # Upper bound where it differs ("clip-higher", e.g. 0.28); None: the same.
  config.loss.clip_epsilon_high = config_dict.placeholder(float)
  # Bound of the ratio for negative advantages, e.g. 3.0; None: off (paper).
  config.loss.dual_clip = config_dict.placeholder(float)
  config.loss.kl_weight = 0.01  # beta; paper. 0: no reference policy
  # Largest KL estimate of a token; a token above it has no gradient from the
  # KL. The released code has 10.0. None: off (paper).
  config.loss.kl_clamp = config_dict.placeholder(float)
  config.loss.entropy_weight = 0.001  # code
  # EPO: weight, times entropy_weight, of entropy outside of these shares of its
  # mean over the iterations before; 0: off. Falls as 1 + exp(-decay k / (K/2)).
  config.loss.corridor_weight = 0.0
  config.loss.corridor_low = 0.8
  config.loss.corridor_high = 1.2
  config.loss.corridor_decay = 1.0
  # token_mean | sequence_mean | fixed_length
  config.loss.aggregation = 'token_mean'
  # learner: recomputed before the first update; sampler: as sampled, which
  # is cheaper, and in the last bits depends on how requests were scheduled.
  config.loss.old_log_probs = 'learner'
  # Bound of the weight that makes up for the sampler's other arithmetic, e.g.
  # 2.0; needs old_log_probs=learner. None: off.
  config.loss.tis_clip = config_dict.placeholder(float)

  config.optimizer = ml_collections.ConfigDict()
  config.optimizer.learning_rate = 1e-6  # paper
  config.optimizer.warmup_updates = 0
  config.optimizer.decay_updates = 0  # on a line to zero; 0: constant
  config.optimizer.b1 = 0.9
  config.optimizer.b2 = 0.999
  # In which the gradient's mean is kept; bfloat16 saves an eighth of memory.
  config.optimizer.mu_dtype = 'float32'
  config.optimizer.weight_decay = 0.01  # code
  config.optimizer.max_grad_norm = 1.0  # code

  # Low-rank adapters, trained instead of the model.
  config.lora = ml_collections.ConfigDict()
  config.lora.rank = 0  # 0: the model is trained
  config.lora.alpha = 32.0
  config.lora.targets = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')

  config.learner = ml_collections.ConfigDict()
  config.learner.minibatch_rows = 256  # rows of an update; paper, ALFWorld
  config.learner.microbatch_rows = 16  # rows in memory at once
  # Updates are skipped if loss or gradient is not finite; after as many in a
  # row the run stops.
  config.learner.max_skipped_in_row = 5
  # Rows with the same prompt go into the same update, and pay for it once.
  config.learner.share_prompts = False
  # Row lengths that the update is compiled for: those below
  # max_prompt_tokens + max_completion_tokens and that sum itself; () is half of
  # the sum and the sum.
  config.learner.length_buckets = (640, 1024, 1536, 2560)

  config.evaluation = ml_collections.ConfigDict()
  config.evaluation.split = config_dict.placeholder(str)
  # Panel: the first tasks of the split; 0: all of them.
  config.evaluation.num_tasks = 0
  config.evaluation.every = 5  # iterations; code. 0: never
  config.evaluation.temperature = 0.4  # paper
  # As of `rollout`, but independent of it; off.
  config.evaluation.top_p = 1.0
  config.evaluation.top_k = 0
  config.evaluation.min_p = 0.0

  config.checkpoint = ml_collections.ConfigDict()
  config.checkpoint.every = 5  # iterations
  config.checkpoint.keep = 2

  config.metrics = ml_collections.ConfigDict()
  # Project of Weights & Biases to write to as well; '': none. Without a key the
  # run is kept in the work directory, for `wandb sync`.
  config.metrics.wandb = ''

  # Training episodes as a data set, WORKDIR/episodes.
  config.episodes = ml_collections.ConfigDict()
  config.episodes.every = 0  # iterations between two that are kept; 0: none

  # Supervised warm start on expert episodes (launch/sft.py).
  config.sft = ml_collections.ConfigDict()
  # Episodes of a run to imitate instead, its WORKDIR/episodes; '': the expert.
  config.sft.data = ''
  config.sft.only_successful = True  # of these
  config.sft.num_episodes = 2000
  config.sft.noise = 0.0  # probability of a random action in a step
  config.sft.epochs = 1
  config.sft.learning_rate = 1e-5
  config.sft.warmup_updates = 0
  config.sft.decay = True  # of the learning rate, on a line to zero
  config.sft.minibatch_rows = 128
  config.sft.report_rows = 6400  # rows between two lines of metrics
  # Whether only the response is learnt; False learns the prompt's text too.
  config.sft.completion_only = True
  # Start: '' takes model.path; 'scratch' makes tokenizer and weights anew.
  config.sft.init = ''
  config.sft.vocab_size = 1024  # of a new tokenizer
  config.sft.model = ml_collections.ConfigDict()  # shape of new weights
  config.sft.model.layers = 4
  config.sft.model.width = 128
  config.sft.model.heads = 4
  config.sft.model.kv_heads = 2
  config.sft.model.mlp = 384
  return config
