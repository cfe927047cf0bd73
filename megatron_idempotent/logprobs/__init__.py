"""Computes log-probs, entropies and divergences of tokens over a vocabulary that ranks share.

Legend: N tokens, V columns of the vocabulary on this rank, R ranks that share it.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
