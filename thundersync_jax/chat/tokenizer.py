"""Ids and text of a folder's tokenizer, to which the marks of others are no tokens."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.chat import tokenizer_files

_GUARD = "\ue000"  # private use: keeps a mark in foreign text from being one


class Tokenizer:
    """The vocabulary of a folder.

    Attributes:
      marks: Ids of special tokens, by their text.
      vocab_size: One more than the largest id.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._tokenizer = tokenizer_files.load_tokenizer(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self.marks = {t.content: i for i, t in added.items() if t.special}
        self._special_ids = np.array(sorted(self.marks.values()), np.int64)
        self.vocab_size = 1 + max(self.vocabulary().values())

    def decode(self, ids: np.ndarray) -> str:
        """Text with all marks, unknown ids by number; ValueError of a negative one."""
        ids = np.asarray(ids, np.int64).tolist()
        bad = next((token for token in ids if token < 0), None)
        if bad is not None:
            raise ValueError(
                f"token {bad} is no id; expected 0 or more. Check what produced it."
            )
        parts = []
        for known, run in itertools.groupby(ids, self._known):
            if known:
                parts.append(self._tokenizer.decode([*run], skip_special_tokens=False))
            else:
                parts += [f"<{token}>" for token in run]
        return "".join(parts)

    def special(self, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids)
        return np.isin(ids, self._special_ids) | (ids >= self.vocab_size)

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def token_to_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def foreign(self, text: str) -> str:
        """Text of others: its marks made harmless, what UTF-8 cannot hold as "?"."""
        text = text.encode("utf-8", errors="replace").decode().replace(_GUARD, "?")
        return self._any_mark.sub(lambda m: m[0][0] + _GUARD + m[0][1:], text)

    def encode(self, text: str) -> np.ndarray:
        """The ids of rendered text; the template has put its own first token there."""
        if _GUARD not in text:
            return np.asarray(_ids(self._tokenizer, text), np.int32)
        ids = []
        for part in re.split(f"({self._any_mark.pattern})", text):
            if part in self.marks:
                ids.append(self.marks[part])
            else:
                ids += _ids(self._plain, part.replace(_GUARD, ""))
        return np.asarray(ids, np.int32)

    def _known(self, token: int) -> bool:
        return bool(self._tokenizer.id_to_token(token))

    @functools.cached_property
    def _any_mark(self) -> re.Pattern:
        longest = sorted(self.marks, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) or "(?!)")

    @functools.cached_property
    def _plain(self) -> Any:
        """The tokenizer to which marks are text."""
        plain = tokenizer_files.load_tokenizer(self._folder)
        plain.encode_special_tokens = True
        return plain


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text; Python's other threads go on meanwhile, as in no other call."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
