"""
Text to token ids and back, rebuilt from the dict that meta.json and every checkpoint carry: words, characters or
GPT-2's byte pairs.

    {"tokenizer": "word", "vocab": ["<|endoftext|>", "Spain", ...]}     text.split() and " ".join()
    {"tokenizer": "char", "vocab": ["\\n", " ", "!", ...]}
    {"tokenizer": "gpt2"}                                               tiktoken, imported only here

It trains no tokenizer.
"""

import difflib

END = "<|endoftext|>"  # stands between documents


class Tokenizer:
    """encode(text) -> list of ids, decode(ids) -> text; vocab_size; end_id, the id of <|endoftext|> or None; meta.

    Raises ValueError for a meta of unknown kind, for text with a word or character outside the vocabulary, and for an
    id outside it.
    """

    def __init__(self, meta):
        self.meta, self.kind = meta, meta.get("tokenizer")
        if self.kind == "gpt2":
            self.bpe = load_gpt2()
            self.vocab_size, self.end_id = self.bpe.n_vocab, self.bpe.eot_token
        elif self.kind in ("word", "char"):
            self.vocab = meta["vocab"]
            self.id_of = {piece: i for i, piece in enumerate(self.vocab)}
            self.vocab_size, self.end_id = len(self.vocab), self.id_of.get(END)
        else:
            raise ValueError(f"tokenizer must be word, char or gpt2, got {self.kind!r}")

    def encode(self, text):
        if self.kind == "gpt2":
            return self.bpe.encode(text, allowed_special={END})
        pieces = text.split() if self.kind == "word" else text
        try:
            return [self.id_of[piece] for piece in pieces]
        except KeyError as e:
            near = difflib.get_close_matches(e.args[0], self.vocab, n=3)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ValueError(f"the {self.kind} {e.args[0]!r} is not among the {self.vocab_size:,} "
                             f"this model was trained on{hint}") from None

    def decode(self, ids):
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the tokenizer's 0 to {self.vocab_size - 1}: the model is "
                                 "padded beyond it, or the device returned garbage")
        if self.kind == "gpt2":
            return self.bpe.decode(ids)
        return (" " if self.kind == "word" else "").join(self.vocab[i] for i in ids)


def load_gpt2():
    """tiktoken's encoding, or a ValueError that says what it needs."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError:
        raise ValueError("this text is in GPT-2's byte pairs: pip install tiktoken") from None
    except (OSError, ValueError) as e:  # no network, or a page that is not the file
        raise ValueError(f"tiktoken could not fetch GPT-2's byte pairs ({type(e).__name__}). Without network, set "
                         "TIKTOKEN_CACHE_DIR to a private folder that holds its two files; see the README") from None
