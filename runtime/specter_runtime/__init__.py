"""Specter's runtime: opens a bundle and decodes from it, token for token what the target says.

The folder reads from the top down as *loop > model > experts > storage > format*:
``session`` opens a bundle and streams text; ``speculative_decoder`` is the only loop;
``draft_engine``, ``prefetcher`` and ``acceptance`` are its parts; ``model``, ``moe``, ``layers``
and ``kv_cache`` are the network; ``expert_cache``, ``expert_store`` and ``eviction`` move experts;
``bundle_loader``, ``shards``, ``manifest`` and ``packed`` are the format.

Shape legend, used in every module:
``T`` new tokens, ``S`` tokens in the KV cache, ``D`` hidden_size, ``H`` query heads,
``G`` key/value heads, ``C`` head_dim, ``E`` experts, ``K`` experts per token,
``I`` moe_intermediate_size, ``V`` vocabulary, ``L`` layers, ``N``/``M`` rows/columns of a weight.

Importing this package imports no click, no transformers and nothing of ``specter_build``.
"""

from specter_runtime.errors import BundleError, CapacityError, SpecterError

__all__ = ["BundleError", "CapacityError", "SpecterError", "__version__"]
__version__ = "0.1.0"
