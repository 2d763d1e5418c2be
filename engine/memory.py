"""How many bytes a request takes on the device, predicted from its shape."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import PreparedRequest


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes per token of what a request holds, and the bytes that all requests together may hold.

    `budget_bytes` is what is left of the device after the weights and one workspace for the largest single item of
    work; the runner measures it at start-up.
    """

    budget_bytes: int
    kv_bytes_per_token: int  # a prefix token of one branch, all layers
    embed_bytes_per_token: int  # a text token of one branch
    latent_bytes_per_token: int  # a target or condition token of one image
    rotary_bytes_per_token: int  # a target token of one branch

    def prefix_bytes(self, request: PreparedRequest) -> int:
        """The prefix KV of every branch: taken at prefill, and given up under pressure."""
        return self.kv_bytes_per_token * sum(prompt.layout.prefix_len_tokens for prompt in request.prompts)

    def state_bytes(self, request: PreparedRequest) -> int:
        """Everything else: taken at encode and held to the end."""
        target = request.target_grid.num_tokens
        latents_per_image = 2 if request.preview_steps else 1  # the clean estimate waits for its decode
        text = sum(prompt.layout.num_text_tokens for prompt in request.prompts)
        condition = sum(image.grid.num_tokens for image in request.condition_images)
        return (
            self.embed_bytes_per_token * text
            + self.latent_bytes_per_token * (condition + latents_per_image * request.num_images * target)
            + self.rotary_bytes_per_token * request.num_branches * target
        )

    def total_bytes(self, request: PreparedRequest) -> int:
        return self.prefix_bytes(request) + self.state_bytes(request)


UNLIMITED = MemoryModel(2**62, 1, 1, 1, 1)
