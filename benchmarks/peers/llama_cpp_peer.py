"""llama.cpp through its low-level batch interface: all requests in one context, continuous batching, greedy.

`model` is a GGUF file; `dtype` is ignored: it runs the weights as they lie in the file.
"""

from __future__ import annotations

from typing import Any

UBATCH_TOKENS = 512  # llama.cpp's own default


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self._lib, self._numpy = llama_cpp, numpy
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            settings["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"{settings['model']} cannot be loaded")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._settings = settings
        self._made: Any = None
        self._shape = (0, 0)

    def generate(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        lib = self._lib
        longest = max(len(request["prompt_ids"]) + request["num_new"] for request in requests)
        context = self._context(len(requests), -(-longest // 256) * 256)
        batch = lib.llama_batch_init(UBATCH_TOKENS, 0, 1)
        try:
            return self._run(context, batch, requests)
        finally:
            lib.llama_batch_free(batch)

    def _context(self, num_rows: int, tokens_per_row: int) -> Any:
        """An empty context, the last one if it has this shape. Rows have caches of their own, which is faster."""
        lib = self._lib
        if self._shape != (num_rows, tokens_per_row):
            if self._made is not None:
                lib.llama_free(self._made)
            params = lib.llama_context_default_params()
            params.n_ctx = num_rows * tokens_per_row
            params.n_seq_max = num_rows
            params.n_batch = params.n_ubatch = UBATCH_TOKENS
            params.n_threads = params.n_threads_batch = self._settings["threads"]
            params.kv_unified = False
            self._made, self._shape = lib.llama_init_from_model(self._model, params), (num_rows, tokens_per_row)
            if not self._made:
                raise RuntimeError(f"no context of {num_rows} rows of {tokens_per_row} tokens")
        lib.llama_memory_clear(lib.llama_get_memory(self._made), True)
        return self._made

    def _run(self, context: Any, batch: Any, requests: list[dict[str, Any]]) -> list[list[int]]:
        """Each batch has the next token of every row under way, then as much of the waiting prompts as fits."""
        lib = self._lib
        outputs: list[list[int]] = [[] for _ in requests]
        done = [0] * len(requests)  # tokens computed
        while any(len(out) < request["num_new"] for out, request in zip(outputs, requests, strict=True)):
            batch.n_tokens = 0
            samples: list[tuple[int, int]] = []  # (row, index in the batch)
            started = [row for row, out in enumerate(outputs) if out and len(out) < requests[row]["num_new"]]
            for row in [*started, *(row for row, out in enumerate(outputs) if not out)]:
                tokens = requests[row]["prompt_ids"] + outputs[row]
                end = min(len(tokens), done[row] + UBATCH_TOKENS - batch.n_tokens)
                for position in range(done[row], end):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at] = tokens[position], position
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                    batch.logits[at] = position == len(tokens) - 1
                    batch.n_tokens += 1
                if end == len(tokens) and end > done[row]:
                    samples.append((row, batch.n_tokens - 1))
                done[row] = end
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for row, at in samples:
                logits = self._numpy.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), (self._vocab_size,))
                outputs[row].append(int(logits.argmax()))
        return outputs


def open_engine(settings: dict[str, Any]) -> Engine:
    return Engine(settings)
