"""The images of one checkpoint's prompts; the last ones are kept for their next turns."""

import hashlib
import math
from pathlib import Path

from radixrt.base.image_parts import KEPT_IMAGE_BYTES
from radixrt.messages.images import VisionInfo
from radixrt.tokenizer.fair_queue import goes_on
from radixrt.tokenizer.images.decoding import DEFAULT_LIMITS, ImageLimits
from radixrt.tokenizer.images.preparer import CpuBudget, free_preparer
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.prompt.kept_answers import TokenMemory

KEPT_FILE_BYTES = 512 << 20
"""Files of the large ones of the last images."""


class KeptImages:
    """Prepares images, each once while it is kept. Safe to use from several threads.

    Args:
        folder: of the checkpoint.
        files: folder for large tensors; None: they stay in memory.
    """

    def __init__(
        self,
        folder: Path,
        vision: VisionInfo,
        limits: ImageLimits = DEFAULT_LIMITS,
        files: Path | None = None,
    ) -> None:
        self.vision = vision
        self.limits = limits
        self._folder, self._files = folder, files
        self._memory: TokenMemory[ProcessedImage] = TokenMemory(KEPT_IMAGE_BYTES)
        self._in_files: TokenMemory[ProcessedImage] = TokenMemory(KEPT_FILE_BYTES)

    def load(self) -> None:
        """Load the processor ahead of the first image.

        Raises:
            RequestError: not now.
        """
        with free_preparer() as preparer:
            preparer.load(self._folder, self.vision)

    def process(self, data: str, where: str, budget: CpuBudget | None = None) -> ProcessedImage:
        """
        Args:
            data: the file in base64.
            where: names the image in errors.
            budget: of the request.

        Raises:
            RequestError: it can't be decoded, is too large, or the budget is used up.
            NobodyWaits: the request is not wanted any more.
        """
        content = data.encode(errors="surrogatepass")
        file_key = hashlib.sha256(content).digest()
        found = self._memory.find(file_key) or self._in_files.find(file_key)
        if found is None:
            budget = budget or CpuBudget()
            budget.check(where)
            with free_preparer() as preparer:
                found = preparer.prepare(
                    content,
                    where,
                    self._folder,
                    self.vision,
                    limits=self.limits,
                    budget=budget,
                    files=self._files,
                )
            goes_on()
            memory = self._memory if found.file is None else self._in_files
            memory.keep(file_key, found, 4 * math.prod(found.shape))
        return found
