"""From logits to tokens: processors, counter-based noise, verification of drafts."""
