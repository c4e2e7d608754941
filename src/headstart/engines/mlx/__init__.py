"""MLX: models in Hugging Face's form (`config.json` with `*.safetensors`), computed by mlx and mlx-lm.

    layers   the cache of each layer: KV by token, or state
    head     logits of a call's last token only
    batch    one step of several slots
    padded   the KV of short slots as one array, while they are decoded together
    ahead    a step's graph, built while the last step is computed
    load     model, sizes and identity
    engine   the contract

`mlx` and `mlx_lm` are imported only when a model is loaded: `pip install 'headstart[mlx]'`.
"""

from headstart.engines.mlx.engine import MlxEngine

__all__ = ["MlxEngine"]
