"""transformers: packed documents see each other where a cache is made, or a mask is given.

python findings/transformers_packed_with_a_cache.py
"""

import torch
from finding import settle, tiny_model


def check() -> tuple[bool, str]:
    model = tiny_model()
    ids = torch.arange(1, 13)[None]
    positions = torch.arange(6).repeat(2)[None]  # of two documents
    other = torch.where(torch.arange(12) < 6, ids + 20, ids)  # another first document

    def moved(**options: object) -> float:
        """By how much the second document's logits depend on the first."""
        with torch.no_grad():
            one, two = (model(each, position_ids=positions, **options).logits[:, 6:] for each in (ids, other))
        return float((one - two).abs().max())

    apart, default = moved(use_cache=False), moved()
    masked = moved(use_cache=False, attention_mask=torch.ones_like(ids))
    return (
        apart == 0 and min(default, masked) > 1e-3,
        f"another first document moves the second one's logits by {apart:.1e} with use_cache=False, by {default:.1e} with the default, and by "
        f"{masked:.1e} with use_cache=False and a mask of ones",
    )


if __name__ == "__main__":
    raise SystemExit(settle(check, libraries=("transformers",)))
