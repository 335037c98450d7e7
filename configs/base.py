"""Lists every config field with its default, unit and source.

The dataclass that uses an option declares the same default and the accepted
values; `gigpo_jax.config.SECTIONS` lists these dataclasses. docs/methods.md
explains the options of algorithms, modulators, selectors and losses. Its text
is that of their docstrings. Experiments start from `get_config` and change a
few fields. "paper" marks values from the hyper-parameter tables of GiGPO
(arXiv:2505.10978), "code" values from its authors' release. A run is refused if
a required path is empty.
"""

import importlib
import warnings

import ml_collections
from ml_collections import config_dict

# Algorithm of a config without another algorithm's variant.
DEFAULT_ALGORITHM = 'gigpo'


def get_config() -> ml_collections.ConfigDict:
  """Returns the defaults of all experiments."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  # An iteration plays G x N episodes and makes one pass of updates. Paper: 150.
  config.num_iterations = 150
  config.model = _model_section()
  config.env = _env_section()
  config.pool = _pool_section()
  config.mesh = _mesh_section()
  config.rollout = _rollout_section()
  config.reward = _reward_section()
  config.tasks = _tasks_section()
  config.filter = _filter_section()
  config.algorithm = _algorithm_section()
  config.critic = _critic_section()
  config.loss = _loss_section()
  config.teacher = _teacher_section()
  config.optimizer = _optimizer_section()
  config.lora = _lora_section()
  config.learner = _learner_section()
  config.guard = _guard_section()
  config.evaluation = _evaluation_section()
  config.checkpoint = _checkpoint_section()
  config.metrics = _metrics_section()
  config.episodes = _episodes_section()
  config.sft = _sft_section()
  return config


def _model_section() -> ml_collections.ConfigDict:
  """Returns the options of the model and its arithmetic."""
  model = ml_collections.ConfigDict()
  # Hugging Face folder (config.json, *.safetensors, tokenizer), or a name on
  # the hub: organisation/name or organisation/name@revision.
  model.path = config_dict.placeholder(str)
  # Compute type. Parameters and optimizer state are float32.
  model.dtype = 'bfloat16'
  # Activations that the backward pass recomputes to save memory: none, matrices
  # (all except matmuls with parameters), layer (all), or auto: the first of
  # these whose compiled update fits the memory of a device. Where that memory
  # is unknown, as on CPUs, auto is none up to 8 layers and layer above.
  model.remat = 'auto'
  # Attention of the update: xla, blockwise (CPU), splash (TPU), cudnn (NVIDIA),
  # auto: the platform's; splash and cudnn with bfloat16 only, otherwise xla.
  model.attention = 'auto'
  # Attention of the sampler over its cache: xla reads all positions; triton
  # (NVIDIA) and paged (TPU) are kernels that read each row up to its position.
  # auto: triton with bfloat16 on NVIDIA, otherwise xla.
  model.decode_attention = 'auto'
  # Switch in the chat template of models that think by default (Qwen3).
  model.enable_thinking = False
  return model


def _env_section() -> ml_collections.ConfigDict:
  """Returns the options of the environment; its config file adds others."""
  env = ml_collections.ConfigDict()
  env.name = config_dict.placeholder(str)
  # history: every turn has a prompt of its own, with the last turns.
  # conversation: an episode is one growing conversation; each turn adds
  # messages and a response.
  env.context = 'history'
  return env


def _pool_section() -> ml_collections.ConfigDict:
  """Returns the options of the pool of environments."""
  pool = ml_collections.ConfigDict()
  # Environments that run at once. 0: one per episode of an iteration, including
  # those of evaluation.inside_rollout. With rollout.carry_over, one per episode
  # of 1 + max_staleness iterations.
  pool.num_envs = 0
  # Worker processes. 0: run environments in this process (debugging).
  pool.num_workers = 2
  pool.step_timeout_secs = 60.0
  pool.reset_timeout_secs = 300.0
  # Resets after which a worker is replaced; its running episodes are replayed.
  # 0: never.
  pool.max_resets_per_worker = 0
  # Memory, in MiB, above which a worker is replaced. 0: no limit.
  pool.max_worker_mib = 0
  # Largest share of failed episodes in an iteration or an evaluation. The run
  # stops above it, and if all fail.
  pool.max_failed_share = 0.25
  return pool


def _mesh_section() -> ml_collections.ConfigDict:
  """Returns the number of devices per axis of the mesh."""
  mesh = ml_collections.ConfigDict()
  # Devices per mesh axis. -1: all remaining devices. data=0: all remaining
  # devices if fsdp is given and no other axis is -1. If fsdp is -1, data=0 is 1
  # on one host, and on several hosts as many copies of the parameters (HSDP) as
  # fit if each of them, with its optimizer state, takes at most an eighth of
  # the memory of its devices.
  mesh.data = 0
  mesh.fsdp = -1
  mesh.expert = 1
  mesh.sequence = 1
  mesh.tensor = 1
  return mesh


def _rollout_section() -> ml_collections.ConfigDict:
  """Returns the options of collecting episodes."""
  rollout = ml_collections.ConfigDict()
  rollout.groups = 16  # G; paper
  rollout.episodes_per_group = 8  # N; paper
  rollout.max_prompt_tokens = 2048  # paper, ALFWorld
  rollout.max_completion_tokens = 512  # paper
  # For prompts over the limit: error | drop_history | truncate_left | end (of
  # the episode). drop_history also cuts off the first tokens of a prompt that
  # is too long without history. In a conversation, it drops the oldest turns
  # until half of the limit is free, and truncate_left is refused.
  rollout.prompt_overflow = 'drop_history'
  # Thinking in earlier turns of a conversation. keep: stays as sampled.
  # template: dropped where the chat template drops it (Qwen3: before the last
  # user message).
  rollout.earlier_thinking = 'keep'
  # Largest number of turns, by first iteration, such as ((0, 10), (50, 20)).
  # (): the environment's own limit.
  rollout.horizon = ()
  # Texts with which responses may begin, such as ('<answer>', '<think>'): modes
  # of a policy, the cheapest first.
  rollout.prefixes = ()
  # Episodes per group whose responses are forced to begin with each prefix: the
  # first ones with the first prefix, and so on; the others are free. A forced
  # prefix is part of the prompt and not trained on.
  rollout.forced_members = 0
  # Largest number of turns of an episode per iteration. Unfinished episodes
  # pause, and their group continues in the next iteration; needs
  # loss.old_log_probs=sampler, or loss.tis_clip, such as 2.0. 0: every episode
  # runs to its end.
  rollout.carry_over = 0
  # Largest number of iterations between sampling a turn and training on it; an
  # episode that was carried so often runs to its end.
  rollout.max_staleness = 4
  rollout.temperature = 1.0  # paper
  rollout.top_p = 1.0  # paper
  rollout.top_k = 0  # tokens; 0: off
  # Lowest probability of a token relative to the most likely token. 0: off.
  rollout.min_p = 0.0
  # Whether `</action>` (search QA: `</search>`, `</answer>`) also ends a
  # response.
  rollout.stop_at_action = False
  # async: episodes advance independently; lockstep: all wait for the slowest.
  rollout.schedule = 'async'
  # Weights of the sampler. model: model.dtype with merged adapters, in float32
  # only: bfloat16 would round small adapters away. adapters: model.dtype with
  # separate adapters, exact and slower. int8: half the memory of bfloat16, for
  # models without adapters. The metrics sampler/... compare the sampler with
  # the learner.
  rollout.weights = 'model'
  # Keys and values in the sampler's cache. model: model.dtype. int8: half the
  # memory of bfloat16.
  rollout.cache = 'model'
  # Devices that share one copy of the model while sampling. 0: mesh.tensor,
  # or more if the copy takes over a quarter of a device's memory. If each copy
  # lies within one host, the hosts sample independently.
  rollout.tensor = 0
  # Keys and values that later turns reuse. none: of identical prompts. prompts:
  # of the prompts that a prompt continues; changes no sampled token. all: also
  # of responses, which decoding rounds differently.
  rollout.reuse_cache = 'none'
  # Tokens of a prompt that are prefilled together. 0: the whole prompt, or 64
  # with rollout.reuse_cache. Only changes rounding.
  rollout.prefill_chunk = 0
  # Rows of the cache, besides the slots, that hold conversations between turns.
  rollout.parked_slots = 0
  # Tokens of a slot decoded between two checks for finished responses; with
  # drafts, passes over the network.
  rollout.decode_tokens = 8
  # Speculative decoding: tokens of a draft, taken from earlier responses of the
  # group, that a pass checks. 0: off. Changes no sampled token, except for
  # rounding.
  rollout.draft_tokens = 0
  # Sizes that the sampler is compiled for. max_prompt_tokens is always the last
  # prompt bucket, and larger ones are ignored. (): half of the limit and the
  # limit. The last batch bucket is the number of slots, the requests that are
  # decoded at once.
  rollout.prompt_buckets = (512, 1024, 2048)
  rollout.batch_buckets = (32, 128)
  return rollout


def _reward_section() -> ml_collections.ConfigDict:
  """Returns the options that change rewards before advantages."""
  reward = ml_collections.ConfigDict()
  # Weight of the KL to the reference policy in the reward of a turn; 0: off.
  # Estimator: k1 | k2 | k3 | abs.
  reward.kl_weight = 0.0
  reward.kl_estimator = 'k1'
  # Tokens before the limit of a response in which a penalty grows from 0 to
  # overlong_penalty (DAPO); 0: off.
  reward.overlong_buffer = 0
  reward.overlong_penalty = 1.0
  # Reward of a step if the environment has several agents. team: the rewards of
  # all agents until the agent's next step; own: the agent's own until then.
  reward.agents = 'team'
  # Functions of finished training episodes, 'module:function'; see
  # envs/rewards.py. Weights of the functions, (): 1 each, and of the
  # environment's own reward.
  reward.functions = ()
  reward.function_weights = ()
  reward.environment_weight = 1.0
  # Worker processes that call the functions, one episode each at a time, and
  # their time limit for an episode.
  reward.num_workers = 2
  reward.timeout_secs = 60.0
  # Functions that read probabilities of texts under the policy; see
  # gigpo_jax/scored_rewards.py. Their weights, (): 1 each.
  reward.scored = ()
  reward.scored_weights = ()
  # Options of the function envs.judge:Judge. A config file adds a section like
  # it for the options of another class.
  reward.judge = ml_collections.ConfigDict()
  # Endpoint, such as http://127.0.0.1:8000/v1, and model.
  reward.judge.url = ''
  reward.judge.model = ''
  reward.judge.rubric = (
    'Did the agent accomplish the task, without needless steps?'
  )
  reward.judge.best = 10  # the grade with reward 1; grades start at 0
  reward.judge.max_tokens = 512  # of its answer
  reward.judge.max_chars = 40_000  # of an episode; the middle is dropped
  reward.judge.request_secs = 15.0
  reward.judge.retries = 2
  # Environment variable that holds the key.
  reward.judge.key_variable = 'OPENAI_API_KEY'
  return reward


def _tasks_section() -> ml_collections.ConfigDict:
  """Returns the options of the order of training tasks."""
  tasks = ml_collections.ConfigDict()
  # epochs: all tasks, shuffled in each epoch. uncertain: tasks with an
  # intermediate success rate more often; the share `uniform` of the
  # probability is uniform. stages: only some types of tasks at first.
  tasks.draw = 'epochs'
  tasks.uniform = 0.5
  # uncertain: weight of the diversity of a task's episodes; 0.2 in MMR1.
  tasks.diversity_weight = 0.0
  # (first iteration, types of tasks), such as ((0, ('pick',)), (50, ())); ():
  # all types.
  tasks.stages = ()
  return tasks


def _filter_section() -> ml_collections.ConfigDict:
  """Returns the options of dynamic sampling (DAPO), and of selectors.

  docs/methods.md explains them.
  """
  filter = ml_collections.ConfigDict()
  filter.drop_zero_variance = False
  filter.warmup_iterations = 0
  filter.max_refills = 2
  # Chain of selectors of rows and tokens: names in selectors.REGISTRY, or
  # module:function. (): an update trains on all rows. Options of selectors:
  filter.select = ()
  filter.kept_episodes = 4
  filter.group_share = 0.25
  filter.gain_low = 0.0
  filter.gain_high = 1e-2
  filter.fisher_high = 1e-4
  filter.variance_scope = 'batch'
  filter.variance_rows = (0.25, 0.5)
  filter.variance_tokens = (0.2, 0.5)
  filter.early_tokens = 8
  filter.token_probability = 0.5
  filter.mismatch_level = 'token'
  filter.mismatch_low = 0.5
  filter.mismatch_high = 2.0
  return filter


def _algorithm_section() -> ml_collections.ConfigDict:
  """Returns the options of all algorithms; docs/methods.md explains them."""
  algorithm = ml_collections.ConfigDict()
  algorithm.name = DEFAULT_ALGORITHM
  algorithm.discount = 0.95
  algorithm.step_weight = 1.0
  algorithm.episode_weight = config_dict.placeholder(float)
  algorithm.invalid_penalty = 0.1
  algorithm.norm = 'mean_std'
  algorithm.episode_stats = 'trajectories'
  algorithm.penalty_scope = 'reward'
  algorithm.lone_episode = 'zero'
  algorithm.anchor = 'observation'
  algorithm.similarity_threshold = 0.9
  algorithm.anchor_history = 0
  algorithm.history = 2
  algorithm.level_exponent = 1.0
  algorithm.potential_weight = 1.0
  algorithm.failure_exponent = 2.0
  algorithm.potential_discount = 1.0
  algorithm.step_lambda = 0.9
  algorithm.prior_steps = 2.0
  algorithm.evidence_steps = 4.0
  algorithm.graph_discount = 0.1
  algorithm.components = ('reward', 'valid')
  algorithm.component_weights = ()
  algorithm.gae_level = 'token'
  algorithm.gae_discount = 1.0
  algorithm.gae_lambda = 1.0
  algorithm.whiten_advantages = True
  algorithm.cost_power = 2.0
  algorithm.easy_rate = 0.5
  algorithm.set_size = 2
  algorithm.value_temperature = 0.5
  algorithm.gain_weight = 1.0
  algorithm.bundle_tasks = 2
  algorithm.tail_weight = 1.5
  algorithm.quantile_levels = (0.2, 0.8)
  algorithm.quantile_rate = 0.1
  algorithm.continuations = 9
  algorithm.root_share = 0.5
  algorithm.branches_per_turn = 3
  algorithm.branch_probability = 0.5
  algorithm.branch_entropy_weight = 0.2
  algorithm.branch_tokens = 20
  _modulator_options(algorithm)
  return algorithm


def _modulator_options(algorithm: ml_collections.ConfigDict) -> None:
  """Adds the options of modulators of advantages."""
  # Chain of modulators: names in modulators.REGISTRY, or module:function. ():
  # the algorithm's advantages. Options of modulators:
  algorithm.modulators = ()
  algorithm.accuracy_temperature = 2.0
  algorithm.short_weight = 0.1
  algorithm.length_unit = 'turns'
  algorithm.confidence_weight = 0.1
  algorithm.confidence_share = 0.2
  algorithm.entropy_bonus = 0.4
  algorithm.entropy_bound = 2.0
  algorithm.confidence_rate = 1.0
  algorithm.clarity_rate = 1.0
  algorithm.clarity_weight = 0.1
  algorithm.target_entropy = 0.5
  algorithm.target_limit = 0.1


def _critic_section() -> ml_collections.ConfigDict:
  """Returns the options of the critic, which some algorithms need."""
  critic = ml_collections.ConfigDict()
  # The critic is the policy's network with one value per token.
  # Learning rate relative to the policy's; paper: 1e-5 and 1e-6.
  critic.rate_ratio = 10.0
  critic.value_clip = 0.5  # code; largest change of a value
  # Iterations that train only the critic.
  critic.warmup_iterations = 0
  return critic


def _loss_section() -> ml_collections.ConfigDict:
  """Returns the options of the loss; docs/methods.md explains them."""
  loss = ml_collections.ConfigDict()
  # A name in losses.REGISTRY, or module:function of an importable module.
  loss.name = 'policy_gradient'
  loss.log_ratio_weight = 1e-3
  loss.log_ratio_to = 'reference'
  loss.surrogate = 'clipped'
  loss.ratio_level = 'token'
  loss.clip_epsilon = 0.2
  loss.clip_epsilon_high = config_dict.placeholder(float)
  loss.dual_clip = config_dict.placeholder(float)
  loss.kl_weight = 0.01
  loss.kl_estimator = 'k3'
  loss.kl_target = config_dict.placeholder(float)
  loss.kl_horizon = 10_000
  loss.kl_clamp = config_dict.placeholder(float)
  loss.entropy_weight = 0.001
  loss.entropy_band = ml_collections.ConfigDict()
  loss.entropy_band.weight = 0.0
  loss.entropy_band.low = 0.8
  loss.entropy_band.high = 1.2
  loss.entropy_band.decay = 1.0
  loss.aggregation = 'token_mean'
  loss.old_log_probs = 'learner'
  loss.max_log_prob_gap = 0.01
  loss.tis_clip = config_dict.placeholder(float)
  loss.tis_level = 'token'
  return loss


def _teacher_section() -> ml_collections.ConfigDict:
  """Returns the options of a teacher in RL."""
  teacher = ml_collections.ConfigDict()
  # The loss is (1 - mu) L_RL + mu L_teacher. mu rises from 0 to mu_peak over
  # the warm-up and falls to mu_valley over the decay (0: stays at its peak).
  # mu_peak=0: no teacher. CHORD-phi: a constant 0.1 with token_weight=phi.
  teacher.mu_peak = 0.0
  teacher.mu_valley = 0.0
  teacher.warmup_iterations = 0
  teacher.decay_iterations = 0
  # L_teacher. imitation: the log-likelihood of the teacher's responses (CHORD).
  # replay: the surrogate of RL on recorded steps (teacher.data), with their
  # advantages and importance ratios to their log-probs. distillation: the
  # surrogate on the iteration's steps, with the advantage log p(token | prompt
  # with the expert's solution) - log p(token | prompt).
  teacher.loss = 'imitation'
  # Weight of a token with loss=imitation. phi: p (1 - p). none: 1.
  teacher.token_weight = 'phi'
  # WORKDIR/episodes of a run, whose successful episodes teach (all of them with
  # sft.only_successful=False). '': the environment's expert plays num_episodes.
  teacher.data = ''
  teacher.num_episodes = 200
  teacher.rows = 64  # of the teacher, in an iteration
  return teacher


def _optimizer_section() -> ml_collections.ConfigDict:
  """Returns the options of AdamW."""
  optimizer = ml_collections.ConfigDict()
  optimizer.learning_rate = 1e-6  # paper
  # Warm-up: a number of updates, or a share of decay_updates.
  optimizer.warmup_updates = 0
  optimizer.warmup_ratio = 0.0
  optimizer.decay_updates = 0  # 0: constant
  # linear, from the first update; cosine, after the warm-up. final_rate: share
  # of the learning rate that remains.
  optimizer.decay = 'linear'
  optimizer.final_rate = 0.0
  optimizer.b1 = 0.9
  optimizer.b2 = 0.999
  optimizer.eps = 1e-8
  # Type of the first moment; bfloat16 saves 2 of 16 bytes per parameter.
  optimizer.mu_dtype = 'float32'
  optimizer.weight_decay = 0.01  # code
  # Words in the names of parameters without decay, such as ('norm', 'bias').
  optimizer.no_decay = ()
  optimizer.max_grad_norm = 1.0  # code
  return optimizer


def _lora_section() -> ml_collections.ConfigDict:
  """Returns the options of low-rank adapters."""
  lora = ml_collections.ConfigDict()
  # Above 0, adapters of this rank are trained instead of the model.
  lora.rank = 0
  lora.alpha = 32.0
  lora.targets = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
  # Agents of the environment, such as ('planner', 'actor'), that have an
  # adapter each. (): one adapter for all.
  lora.agents = ()
  return lora


def _learner_section() -> ml_collections.ConfigDict:
  """Returns the options of the updates."""
  learner = ml_collections.ConfigDict()
  learner.epochs = 1  # passes over the rows of an iteration; paper
  learner.minibatch_rows = 256  # rows per update; paper, ALFWorld
  # Tokens of a microbatch, the rows in memory at once, over all devices. At
  # least one sequence per shard of the mesh's batch axes.
  learner.microbatch_tokens = 40_960
  # An update with a non-finite loss or gradient is skipped. The run stops after
  # this many skipped updates in a row.
  learner.max_skipped_in_row = 5
  # Put rows that begin with the same prompt into one update and compute the
  # tokens that they share once: prompts, and turns of growing conversations.
  learner.share_prompts = False
  # Lengths of sequences that the update is compiled for. A sequence holds
  # several rows, and has the smallest length that fits the longest of them. The
  # last length is always max_prompt_tokens + max_completion_tokens, and larger
  # ones are ignored. (): half of this sum and the sum. Shorter sequences may
  # hold the last rows of an update.
  learner.length_buckets = (2560,)
  return learner


def _guard_section() -> ml_collections.ConfigDict:
  """Returns the options of the guards against collapse."""
  guard = ml_collections.ConfigDict()
  # warn: a line in the console per alarm, and a metric. shrink: an iteration
  # with alarms also multiplies all later updates of the policy by
  # shrink_factor. rollback: it also restores policy, critic and optimizers from
  # the last good checkpoint, at most max_rollbacks times; see docs/running.md.
  guard.action = 'warn'
  guard.shrink_factor = 0.5
  guard.max_rollbacks = 3
  # Alarm levels; 0: off. Largest ratio/kl and filter/fisher_mean in nats, and
  # largest share of steps with an invalid response.
  guard.max_kl = 0.05
  guard.max_fisher = 0.0
  guard.max_invalid_rate = 0.4
  # Smallest and largest entropy and largest mean length of a response, relative
  # to their means over the first iterations.
  guard.min_entropy = 0.05
  guard.max_entropy = 2.0
  guard.max_response = 1.5
  guard.start_iterations = 3
  return guard


def _evaluation_section() -> ml_collections.ConfigDict:
  """Returns the options of evaluations."""
  evaluation = ml_collections.ConfigDict()
  evaluation.split = config_dict.placeholder(str)
  # Evaluation tasks: the first ones of the split. 0: all.
  evaluation.num_tasks = 0
  # Episodes per task; above 1, also pass@k: the best of k = 2, 4, ... episodes.
  evaluation.repeats = 1
  evaluation.every = 5  # iterations; code. 0: never
  # Whether evaluation episodes are played together with the training episodes
  # of the same policy. They fill the slots that the last training episodes
  # leave empty. The last evaluation is always separate.
  evaluation.inside_rollout = False
  evaluation.temperature = 0.4  # paper
  # As in `rollout`, but independent of it. Off by default.
  evaluation.top_p = 1.0
  evaluation.top_k = 0
  evaluation.min_p = 0.0
  return evaluation


def _checkpoint_section() -> ml_collections.ConfigDict:
  """Returns the options of checkpoints."""
  checkpoint = ml_collections.ConfigDict()
  checkpoint.every = 5  # iterations
  # Newest checkpoints to keep; the last good one for a rollback stays, too.
  checkpoint.keep = 2
  return checkpoint


def _metrics_section() -> ml_collections.ConfigDict:
  """Returns the options of metrics."""
  metrics = ml_collections.ConfigDict()
  # Weights & Biases project that also receives the metrics. '': none. Without
  # an API key, they are stored in the work directory, for `wandb sync`.
  metrics.wandb = ''
  return metrics


def _episodes_section() -> ml_collections.ConfigDict:
  """Returns the options of the data set of training episodes."""
  episodes = ml_collections.ConfigDict()
  # Episodes are written to WORKDIR/episodes.
  episodes.every = 0  # keep every n-th iteration; 0: none
  return episodes


def _sft_section() -> ml_collections.ConfigDict:
  """Returns the options of the supervised warm start (launch/sft.py)."""
  sft = ml_collections.ConfigDict()
  # imitation: negative log-likelihood. dpo: segment DPO (arXiv:2501.01821) on
  # pairs of recorded episodes that reach the same state; uses failures too.
  sft.loss = 'imitation'
  sft.beta = 0.1  # of DPO; origin: arXiv:2501.01821
  sft.segment_turns = 3  # of each episode of a pair
  # WORKDIR/episodes of a run to imitate instead. '': imitate the expert.
  sft.data = ''
  # Rounds of rejection sampling: some rollouts of rollout.groups x
  # episodes_per_group episodes, then training on the successful ones. 0: none.
  sft.rounds = 0
  sft.rollouts = 1  # in a round
  # Imitate only successful episodes of sft.data and of rounds. dpo also uses
  # the others.
  sft.only_successful = True
  sft.num_episodes = 2000
  sft.noise = 0.0  # probability of a random action per step
  sft.epochs = 1
  sft.learning_rate = 1e-5
  sft.warmup_updates = 0
  sft.decay = True  # linear, of the learning rate to zero
  # Rows per update. With completion_only=False, a conversation is one row.
  sft.minibatch_rows = 128
  # Rows between two lines of metrics, at least sft.minibatch_rows; the last
  # update before a line may have fewer. With dpo, every update has a line.
  sft.report_rows = 6400
  # True trains on responses only; False also trains on an expert's prompts.
  sft.completion_only = True
  # '': start from model.path. 'scratch': new tokenizer and weights.
  sft.init = ''
  sft.vocab_size = 1024  # of a new tokenizer
  sft.model = ml_collections.ConfigDict()  # shape of new weights
  sft.model.layers = 4
  sft.model.width = 128
  sft.model.heads = 4
  sft.model.kv_heads = 2
  sft.model.mlp = 384
  return sft


# Names of the previous release, and where they are now.
_MOVED = {
  'use_tiny_policy': 'sizes.use_tiny_policy',
  'use_mini': 'sizes.use_mini',
  'use_smoke': 'sizes.use_smoke',
  'warm_start': 'sizes.warm_start',
  'parse_variants': 'variants.parse',
  'apply': 'variants.apply',
  'use_algorithm': 'variants.use_algorithm',
  'released': 'variants.released',
  'ALGORITHMS': 'variants.ALGORITHMS',
  'CHANGES': 'variants.CHANGES',
  'PRESETS': 'variants.PRESETS',
}


def __getattr__(name: str) -> object:
  if name not in _MOVED:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  warnings.warn(
    f'configs.base.{name} is deprecated; use configs.{_MOVED[name]}',
    DeprecationWarning,
    stacklevel=2,
  )
  module, _, new = _MOVED[name].partition('.')
  return getattr(importlib.import_module(f'configs.{module}'), new)
