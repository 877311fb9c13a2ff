"""Specter's build: a Hugging Face mixture-of-experts checkpoint and a recipe become a bundle.

``pipeline.build`` is the table of contents. The steps are verbs (``quantize_draft``,
``profile_routing``, ``split_experts``, ``plan_placement``, ``write_bundle``, ``audit``), their
inputs nouns. The build runs the runtime's own model code over one layer at a time.
"""
