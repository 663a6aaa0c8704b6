"""ModelFiles: the parts of an engine that come from the model's folder. Parts that are not given are loaded in
threads."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncllm.config import ChatTemplateConfig, EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.prompt_image import ImagePreparation
from asyncllm.protocol import Executor, Limits
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.sentence_transformers import EmbeddingDefaults
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.tokenizer import Tokenizer as NamedTokenizer

__all__ = ["ModelFiles"]

logger = logging.getLogger(__name__)


@dataclass
class ModelFiles:
    """Call `find`, then `load`; after that executor, tokenizer and chat template exist."""

    model_path: str
    config: EngineConfig
    template_config: ChatTemplateConfig
    executor: Executor | None
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    embedding: EmbeddingDefaults = field(default_factory=EmbeddingDefaults)
    """The checkpoint's settings for embeddings, after `load`."""
    images: ImagePreparation | None = None
    """The image preparation of the model's family, after `load`; None for a text-only model."""
    _folder: Path | None = None
    """The folder to load missing parts from, once it is found."""
    _template_folder: Path | None = None
    """The same for the chat template, if it came from the folder."""

    def __post_init__(self) -> None:
        self._given_tokenizer = self.tokenizer is not None

    async def find(self) -> Executor:
        """Find the model. Return the executor that will run it, not started yet. Raises ModelError."""
        if self.executor is not None and self.tokenizer is not None and self.chat_template is not None:
            return self.executor

        def open_model() -> Executor:
            from asyncllm.agent.executor import open_executor
            from asyncllm.locate import locate, locate_adapter, own_adapter
            from asyncllm.ranks.executor import RankExecutor

            config = self.config
            self._folder = locate(self.model_path, revision=config.revision, download_dir=config.download_dir)
            if self.executor is not None:
                return self.executor
            wanted = {**own_adapter(self._folder, config.hf_overrides), **(config.adapters or {})}
            if wanted:
                found = {
                    name: str(locate_adapter(path, download_dir=config.download_dir)) for name, path in wanted.items()
                }
                self.config = config = msgspec.structs.replace(config, adapters=found)
            if config.isolated or config.tp > 1:
                return RankExecutor(config, self._folder)
            return open_executor(config, self._folder)

        self.executor = await in_thread(open_model)
        return self.executor

    async def load(self) -> Limits:
        """Start the executor, and read the tokenizer meanwhile: loading weights waits for disk and device, not for
        Python."""
        assert self.executor is not None
        starting = asyncio.get_running_loop().create_task(self.executor.start(), name="asyncllm-load")
        try:
            if self._folder is not None:
                await in_thread(self._open_text)
            limits = await starting
        except BaseException:
            starting.cancel()
            await asyncio.wait([starting])
            retrieve(starting)
            raise
        if self._given_tokenizer and self.executor.isolated:
            # Ranks read the checkpoint's own config.
            return msgspec.structs.replace(limits, takes_grammars=False)
        return limits

    async def find_adapter(self, path: str) -> str:
        """Return the folder of a LoRA adapter. Raises ModelError, InvalidParameter."""

        def find() -> str:
            from asyncllm.locate import locate_adapter

            return str(locate_adapter(path, download_dir=self.config.download_dir))

        return await in_thread(find)

    def adapter_template(self, name: str, path: str) -> ChatTemplate | None:
        """Return a LoRA adapter's own chat template, or None if it has none. Reads files. Raises ModelError,
        InvalidParameter."""
        tokenizer, _ = self.texts()
        template = ChatTemplate.of_adapter(name, Path(path), self._template_folder, tokenizer, self.template_config)
        if template is not None:
            logger.info("The adapter %r has a chat template of its own (%s)", name, template.name)
        return template

    def texts(self) -> tuple[Tokenizer, ChatTemplate]:
        """Return the tokenizer and the chat template, after `load`."""
        assert self.tokenizer is not None
        assert self.chat_template is not None
        return self.tokenizer, self.chat_template

    def _open_text(self) -> None:
        from asyncllm.vl.processor import open_images

        assert self._folder is not None
        self.embedding = EmbeddingDefaults.read(self._folder)
        self.images = open_images(self._folder, self.config.hf_overrides)
        joint, budget = 0 if self.images is None else self.images.processor.joint, self.config.prefill_budget
        if joint > budget:
            raise InvalidParameter(
                f"max_prefill_token_num={budget} is less than the {joint} tokens of an image, which see each other and "
                f"are computed in one step. Give it {joint} or more.",
                "max_prefill_token_num",
            )
        self.tokenizer = self.tokenizer or NamedTokenizer(self._folder)
        if self.chat_template is None:
            self.chat_template = ChatTemplate.open(self._folder, self.template_config)
            self._template_folder = self._folder
