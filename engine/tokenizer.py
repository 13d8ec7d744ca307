"""Text <-> token ids, with the model's special tokens and chat template, whatever file they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pagetier.engine.chat_template import ChatTemplate, ChatTemplateError
from pagetier.engine.gguf_tokenizer import backend_from_gguf
from pagetier.engine.models.gguf_config import eos_token_ids
from pagetier.engine.models.hf_config import id_tuple, load_json
from pagetier.engine.token_bytes import TokenBytes
from pagetier.engine.weights.gguf_header import map_file, read_header
from pagetier.kvstore.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What surrounds the vocabulary. named_tokens: `eos_token` -> text. chat_templates: name -> Jinja source, the usual
    one under "default". where: the file, for messages.
    """

    where: str
    eos_token_ids: tuple[int, ...] = ()
    named_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """A loaded tokenizer. Read-only after construction; any thread may use it.

    backend: the `tokenizers` object, for the exporter and for grammars.
    """

    def __init__(self, backend: Backend, facts: TokenizerFacts) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.facts = backend, facts
        self.token_bytes = TokenBytes(backend, facts.where)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = facts.eos_token_ids
        bos = facts.named_tokens.get("bos_token")
        self.bos_token_id: int | None = backend.token_to_id(bos) if bos is not None else None
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._templates = {
            name: ChatTemplate(source, facts.named_tokens) for name, source in facts.chat_templates.items()
        }

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """Built from a GGUF file's metadata. Raises ConfigError naming what is missing or not supported."""
        with map_file(path) as data:
            metadata = read_header(path, data).metadata
        backend = backend_from_gguf(metadata, str(path))
        named = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            text = backend.id_to_token(token_id) if isinstance(token_id, int) else None
            if text is not None:
                named[f"{name}_token"] = text
        prefix = "tokenizer.chat_template"
        templates = {"default": metadata[prefix]} if prefix in metadata else {}
        templates |= {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(prefix + ".")}
        return cls(backend, TokenizerFacts(str(path), eos_token_ids(metadata), named, templates))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From `tokenizer.json` and the files beside it. Raises ConfigError naming the file.

        Where both say whether a bos is added, `tokenizer.json` counts, as in transformers 5.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path}: missing; folders with only a SentencePiece model are not supported")
        try:
            backend = Backend.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception for every fault of the file
            raise ConfigError(f"{path}: not a usable tokenizer: {' '.join(str(exc).split())}") from None
        config = _optional_json(folder / "tokenizer_config.json")
        named = _named_tokens(_optional_json(folder / "special_tokens_map.json")) | _named_tokens(config)
        model = _optional_json(folder / "generation_config.json") or _optional_json(folder / "config.json")
        ids = list(id_tuple(model.get("eos_token_id")))
        if (eos := backend.token_to_id(named.get("eos_token", ""))) is not None:
            ids.append(eos)
        facts = TokenizerFacts(str(folder), tuple(dict.fromkeys(ids)), named, _folder_templates(folder, config))
        return cls(backend, facts)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` adds what the model wants around a text (bos).

        Special tokens *written in* the text become their ids either way. Rendered chat templates already hold theirs:
        pass False. Lone surrogates, which JSON can smuggle in, become U+FFFD.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):  # which of them depends on the library's version
            clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            return list(self.backend.encode(clean, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. What `IncrementalDetokenizer` streams, in one go."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes[token] for token in ids if token not in skipped]).decode("utf-8", "replace")
        return text[1:] if self.token_bytes.strips_first_space and text.startswith(" ") else text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation; `tools`, `documents` and template variables go in `kwargs`.

        Raises ChatTemplateError when the model has no template or the template refuses the messages.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError(f"{self.facts.where}: the model has no chat template; use the completions API")
        return self._templates[name].render(messages, add_generation_prompt, **kwargs)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a `.gguf` file or a Hugging Face folder. Loads no torch. Raises ConfigError."""
    path = checkpoint_path(path)
    return Tokenizer.from_gguf(path) if path.is_file() else Tokenizer.from_folder(path)


def checkpoint_path(path: Path) -> Path:
    """The path itself, or the only `.gguf` of a folder that has no `config.json`. Raises ConfigError."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} .gguf files (name one of them)" if found else "neither config.json nor a .gguf file"
        raise ConfigError(f"{path}: the folder holds {what}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    return path


def _optional_json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.is_file() else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like are a string, an AddedToken object or null."""
    found = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """`chat_template.jinja` and `additional_chat_templates/`, else the config's one source or list of named ones."""
    found: dict[str, str] = {}
    source = config.get("chat_template")
    if isinstance(source, str):
        found["default"] = source
    elif isinstance(source, list):
        found = {str(item["name"]): str(item["template"]) for item in source if {"name", "template"} <= set(item)}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    for name, path in files.items():
        if path.is_file():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as exc:
                raise ConfigError(f"{path}: cannot be read: {exc}") from None
    return found
