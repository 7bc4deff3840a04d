"""Code between the public functions and the kernels (or the reference implementation).

This folder uses these words:

- options: arguments that the user passed, except tensors and positions (``core.call.Options``).
- call: the validated arguments except x (``core.call.Call``), including a spec, a layout and tables.
- spec: description of the computation (``reference.Spec``).
- layout: token counts and grid sizes (``core.call.Layout``).
- tables: tensors that define positions and angles, such as ω (``core.call.Tables``).
- caller's tables: cos and sin that the caller passes instead of ω and positions (``core.call.CosSin``).
- variant: all compile-time settings of a kernel (``core.call.Variant``), called ``V`` in the kernels.
- pass: forward, backward, or backward with dω (``encode.plan.Pass``).
- group: heads that share frequencies.
- row: one head of one sample, of q or k.
- tile: an array (tokens, channels) in the registers of a program. A row may have several tiles.
- block: the tokens of a tile.
- part: the rows of a group that one program processes. In causal linear attention, a part consists of the tokens of a
  piece for which one program computes a state.
- piece: consecutive tokens that one linear attention program processes. The documentation calls it a chunk.
- slot: the tokens of linear attention that read the same state, such as a block or a packed sequence.
- walk: a program's loop over blocks and rows.
- plan: division of the work among programs (each operator has a ``plan.py``).
- launch: a plan with its numeric arguments and its compiled kernel (``encode.launch.Launch``).
- theta: frequencies from which ω is built.
- angles: Θ, the sum over axes of positions times ω, plus any phase.

docs/architecture.md follows a call from top to bottom. docs/tuning.md explains how tile sizes were chosen.
"""
