"""Dimension letters and symbols used everywhere, and masked reductions.

Shape key. **G** groups, **N** episodes per group, **T** steps per episode
(cap), **R** rows, **P** prompt tokens, **C** completion tokens, **L** = P + C
tokens, **V** vocabulary, **B** rows in a microbatch. In models: **D** width,
**H** query heads, **K** key/value heads... see models/qwen.py.

Symbols of the paper (arXiv:2505.10978) and their names here: gamma `discount`,
omega `step_weight`, epsilon of the clip `clip_epsilon`, beta `kl_weight`,
the invalid-action penalty c `invalid_penalty`.
"""
