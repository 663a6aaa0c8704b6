"""Parts: what an engine needs of a model's folder. Whatever is not given is opened from there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from asyncllm.batch import Executor, Limits
from asyncllm.config import ChatTemplateConfig, EngineConfig
from asyncllm.engine.in_thread import in_thread
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Parts"]


@dataclass
class Parts:
    """`find`, then `load`; after that there are all three."""

    executor: Executor | None
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    _folder: Path | None = None
    """Where what is missing is to be opened, once it is found."""
    _template_config: ChatTemplateConfig | None = None

    async def find(self, model_path: str, config: EngineConfig, template_config: ChatTemplateConfig) -> Executor:
        """Find the model. -> the executor that will run it, not started yet. Raises ModelError."""
        if self.executor is not None and self.tokenizer is not None and self.chat_template is not None:
            return self.executor

        def open_model() -> Executor:
            from asyncllm.agent.executor import open_executor
            from asyncllm.locate import locate

            self._folder = locate(model_path, revision=config.revision, download_dir=config.download_dir)
            return self.executor or open_executor(config, self._folder)

        self._template_config = template_config
        self.executor = await in_thread(open_model)
        return self.executor

    async def load(self) -> Limits:
        """Start the executor, and read the tokenizer meanwhile: weights wait for disk and device, not for Python."""
        assert self.executor is not None
        starting = asyncio.get_running_loop().create_task(self.executor.start(), name="asyncllm-load")
        try:
            if self._folder is not None:
                await in_thread(self._open_text)
            return await starting
        except BaseException:
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()
            raise

    def texts(self) -> tuple[Tokenizer, ChatTemplate]:
        """What turns messages into token ids and back, after `load`."""
        assert self.tokenizer is not None
        assert self.chat_template is not None
        return self.tokenizer, self.chat_template

    def _open_text(self) -> None:
        assert self._folder is not None
        assert self._template_config is not None
        self.tokenizer = self.tokenizer or Tokenizer.from_folder(self._folder)
        self.chat_template = self.chat_template or ChatTemplate.open(self._folder, self._template_config)
