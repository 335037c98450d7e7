"""GiGPO on search QA: the released code's task of searching and answering.

    python launch/train.py --config=configs/search_qa.py --config.model.path=..

`env.data_dir` must be a folder in the format of FlashRAG and Search-R1
(envs/search_qa/corpus.py), or 'generated'. On a laptop, make a warm start by
imitation on a generated corpus, and train it:

    python launch/sft.py --config=configs/search_qa.py:tiny
    python launch/train.py --config=configs/search_qa.py:tiny

Variants, joined by commas: a size (`3b`, the default, `7b`; `tiny` for two CPU
cores; `smoke`, the tiny path in two minutes), an algorithm (`grpo`, `ppo`, ...)
and other changes, see `variants.CHANGES`.

Sizes and weights are those of the released code: Qwen2.5-3B and 7B, 200
iterations of 256 groups of 5. Its results are not comparable: it searches
Wikipedia with an embedding model, and this environment uses BM25.
"""

import ml_collections

from configs import base, sizes, variants


def _released() -> ml_collections.ConfigDict:
  config = base.get_config()
  config.num_iterations = 200  # code, search
  config.env.name = 'search_qa'
  # Folder of corpus.jsonl, train.jsonl and test.jsonl. '': $SEARCH_QA_DATA.
  # 'generated': generated files (envs/search_qa/madeup.py).
  config.env.data_dir = ''
  config.env.top_k = 3  # code; passages per search
  config.env.max_passage_chars = 1_000
  config.env.max_steps = 4  # code, search
  config.env.history_length = 4  # K; code, search
  config.env.prompt_style = 'paper'
  config.env.require_think = True
  config.env.generator = ml_collections.ConfigDict()
  config.env.generator.seed = 0
  config.pool.num_workers = 4
  # Results of similar searches differ by one or two passages.
  config.algorithm.anchor = 'similarity'  # code, search
  config.algorithm.similarity_threshold = 0.9  # code, search
  config.algorithm.invalid_penalty = 0.01  # code, search
  config.loss.kl_weight = 0.001  # code, search
  config.loss.entropy_weight = 0.0  # code, search
  config.rollout.groups = 256  # code, search
  config.rollout.episodes_per_group = 5  # code, search
  config.rollout.max_prompt_tokens = 4096  # code, search
  config.rollout.prompt_buckets = (512, 1024, 2048, 4096)
  config.learner.minibatch_rows = 512  # code, search
  config.learner.microbatch_tokens = 36_864
  config.learner.length_buckets = (2560, 4608)
  config.evaluation.split = 'test'
  config.evaluation.temperature = 0.0  # code, search
  return config


def _tiny(config: ml_collections.ConfigDict) -> None:
  """Selects a tiny policy, a small corpus and one passage per search."""
  sizes.use_tiny_policy(config)
  config.num_iterations = 60
  config.env.data_dir = 'generated'
  config.env.generator.num_people = 300
  config.env.top_k = 1
  config.rollout.max_prompt_tokens = 160
  config.rollout.max_completion_tokens = 32
  config.rollout.prompt_buckets = (64, 160)
  config.optimizer.b2 = 0.98
  config.learner.minibatch_rows = 64
  config.learner.length_buckets = (96, 128, 192)
  config.evaluation.num_tasks = 300
  config.evaluation.every = 30
  config.sft.num_episodes = 8000
  config.sft.noise = 0.4
  # Most names are one token, which is easier to copy.
  config.sft.vocab_size = 2048
  config.model.path = sizes.warm_start(__file__, variants.size(config))


def _large(config: ml_collections.ConfigDict) -> None:
  config.learner.microbatch_tokens = 18_432


SIZES = {
  '3b': (),
  '7b': (_large,),
  'tiny': (_tiny,),
  'smoke': (_tiny, sizes.use_smoke),
}


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the experiment; `arg` is a comma-separated list of variants."""
  return variants.make(__file__, arg, _released, SIZES)
