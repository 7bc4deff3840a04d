"""Everything between a public call and the kernels or the reference.

In this folder, each of these words has one meaning:

- options: the user's choices (``core.call.Options``); call: the validated result, without x (``core.call.Call``).
- spec: what to compute; layout: token counts and grid sizes, as integers; tables: all tensors except x, ω first.
- caller's tables: cos and sin that the caller passes instead of ω and positions (``core.call.CosSin``).
- variant: all compile-time settings of a kernel (``core.call.Variant``); ``V`` in the kernels.
- pass: forward, backward, or backward with dω (``encode.plan.Pass``).
- group: heads that share frequencies; row: one head of one sample, of q or k; block: the tokens of a tile.
- tile: an array (tokens, channels) in the registers of a program. A row has several tiles if its channels are treated
  differently.
- part: the rows of a group that one program handles; walk: the order in which it visits blocks and rows.
- plan: how work is divided among programs (``plan.py`` of each operator); launch: a plan with its numbers and its
  compiled kernel (``encode.launch.Launch``).
- theta: frequencies from which ω is built; angles: Θ.

docs/architecture.md follows a call from top to bottom. docs/tuning.md explains how tile sizes were chosen.
"""
