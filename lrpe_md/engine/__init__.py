"""Everything between a public call and the kernels or the reference.

This folder uses each of these words for one thing:

- options: what the user asked for (``core.call.Options``); call: the checked result, without x (``core.call.Call``).
- spec: what to compute; layout: token counts and grid sizes, as integers; tables: the tensors beside x, ω first.
- caller's tables: cos and sin that the caller passes instead of ω and positions (``core.call.CosSin``).
- variant: everything that a kernel is compiled for (``core.call.Variant``); ``V`` in the kernels.
- pass: forward, backward, or backward with dω (``encode.plan.Pass``).
- group: heads that share frequencies; row: one head of one sample, of q or k; block: the tokens of a tile.
- tile: (tokens, channels) that a program holds in registers. A row has several tiles if its channels are treated
  differently.
- part: the rows of a group that one program handles; walk: the order in which it visits blocks and rows.
- plan: how work is divided among programs (``plan.py`` of each operator); launch: a plan with its numbers and its
  compiled kernel (``encode.launch.Launch``).
- theta: frequencies from which ω is built; angles: Θ.

docs/architecture.md follows a call from top to bottom. docs/tuning.md explains how the tiles were found.
"""
