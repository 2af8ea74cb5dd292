"""Parts of tiny random-weight pipelines, made without any download: tokenizers from vocabularies in memory, text
encoders of a few thousand parameters, weights large enough that every input moves the output.
"""

import string
from typing import TypeVar

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

_CHARACTERS = string.digits + string.ascii_letters + string.punctuation
_END_OF_WORD = "</w>"


def clip_tokenizer(max_length: int) -> CLIPTokenizer:
    """Return a CLIP tokenizer that spells words letter by letter (ASCII, lower-cased as CLIP does)."""
    letters = sorted(set(_CHARACTERS.lower()))
    tokens = [*letters, *(letter + _END_OF_WORD for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length, pad_token="<|endoftext|>")


def t5_tokenizer(max_length: int) -> T5Tokenizer:
    """Return a T5 tokenizer whose pieces are single ASCII characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("\u2581", -2.0)]
    pieces += [(character, -6.0) for character in sorted(_CHARACTERS)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length)


def clip_text_encoder(tokenizer: CLIPTokenizer, width: int, projection: int, seed: int) -> CLIPTextModelWithProjection:
    """Return a two-layer CLIP text encoder for ``tokenizer``; ``projection`` is the width of its pooled output."""
    vocabulary = len(tokenizer)
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=projection,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
    return randomize(CLIPTextModelWithProjection(config), seed)


def t5_encoder(tokenizer: T5Tokenizer, width: int, seed: int) -> T5EncoderModel:
    """Return a two-layer T5 encoder for ``tokenizer``."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return randomize(T5EncoderModel(config), seed)


def randomize(module: ModuleT, seed: int, scale: float = 0.15) -> ModuleT:
    """Redraw every parameter in place, from ``seed``: zero-initialised outputs would make a network that ignores its
    input, and a test of it would prove nothing.

    Matrices become normal with standard deviation ``scale``; vectors that were all ones stay near one.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            spread = scale if parameter.ndim > 1 else scale / 3
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    return module.eval()
