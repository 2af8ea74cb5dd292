"""Prompts and tokenizers of glyph: one token per character.

Axes: B batch, N characters of a text, L tokens of a prompt.
"""

import torch
from torch.nn import functional as F
from transformers import CLIPTokenizer, T5Tokenizer

# OCR cannot tell 0 from O or 1 from I, so none of the four is drawn.
ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
TEXT_LENGTH = 4
MAX_SEQUENCE_LENGTH = 16
_PRINTABLE = [chr(code) for code in range(33, 127)]


def prompt_of(text: str) -> str:
    """The prompt that asks for ``text``."""
    return f'text "{text}"'


def spell(ids_BN: torch.Tensor) -> list[str]:
    """The texts that rows of indices into :data:`ALPHABET` stand for."""
    return ["".join(ALPHABET[index] for index in row) for row in ids_BN.tolist()]


def random_ids(
    batch: int, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Uniform texts as indices into :data:`ALPHABET`, shape (batch, TEXT_LENGTH)."""
    return torch.randint(len(ALPHABET), (batch, TEXT_LENGTH), generator=generator, device=device)


def clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer without merges: every printable character is a token, alone or at the end of a word."""
    tokens = [*_PRINTABLE, *(f"{char}</w>" for char in _PRINTABLE), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=MAX_SEQUENCE_LENGTH)


def t5_tokenizer() -> T5Tokenizer:
    """A T5 (Unigram) tokenizer whose pieces are the printable characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((char, -3.0) for char in _PRINTABLE)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=MAX_SEQUENCE_LENGTH)


class TokenTable:
    """Turns indices into prompt tokens on the device, without calling a tokenizer.

    A character's CLIP token depends on whether the word ends with it, and a word ends where letters meet digits; so
    the table holds, for every pair of neighbours, the token of the first.
    """

    def __init__(self, tokenizer: CLIPTokenizer, device: torch.device | str = "cpu"):
        sample = tokenizer(prompt_of("A" * TEXT_LENGTH)).input_ids
        quote_at = len(sample) - 2
        self.first_L = torch.tensor(sample[: quote_at - TEXT_LENGTH], device=device)
        self.last_L = torch.tensor(sample[quote_at:], device=device)
        self.pad = tokenizer.pad_token_id
        inner = [[self._inner(tokenizer, a, b) for b in ALPHABET] for a in ALPHABET]
        self.inner_AA = torch.tensor(inner, device=device)
        self.final_A = torch.tensor([tokenizer(prompt_of(char)).input_ids[-3] for char in ALPHABET], device=device)

    @staticmethod
    def _inner(tokenizer: CLIPTokenizer, char: str, following: str) -> int:
        return tokenizer(prompt_of(char + following)).input_ids[-4]

    def __call__(self, ids_BN: torch.Tensor) -> torch.Tensor:
        """CLIP tokens (B, MAX_SEQUENCE_LENGTH) of the prompts for ``ids_BN``."""
        batch = ids_BN.shape[0]
        inner = self.inner_AA[ids_BN[:, :-1], ids_BN[:, 1:]]
        final = self.final_A[ids_BN[:, -1:]]
        parts = [self.first_L.expand(batch, -1), inner, final, self.last_L.expand(batch, -1)]
        tokens_BL = torch.cat(parts, dim=1)
        return F.pad(tokens_BL, (0, MAX_SEQUENCE_LENGTH - tokens_BL.shape[1]), value=self.pad)
