"""From a public call to the kernels, or to the reference.

The words of this folder, each for one thing:

- call: everything about an encoding but x, checked (``call.Call``); options are what the user asked for.
- spec: what is computed; layout: where the tokens are, in integers; tables: the tensors beside x, ω first.
- given tables: cos and sin that the caller has in place of ω and positions (``call.CosSin``).
- variant: what a kernel is compiled for (``call.Variant``), ``V`` in the kernels.
- pass: forward, backward, or backward with dω (``plan.Pass``).
- group: heads that share frequencies; row: a head of a sample, of q or of k; block: tokens that a tile has.
- tile: what a program holds in registers at a time, (tokens, channels) of some rows; a row is several tiles where its
  channels are not all treated alike.
- part: a group's rows that one program goes through; walk: its way through blocks and rows where it has several.
- work: what is to be cut into programs; plan: how it is cut (``plan.py``); launch: a plan with its numbers and its
  compiled kernel (``launch.Launch``).
- theta: frequencies from which ω is built; angles: Θ.

docs/architecture.md follows a call from top to bottom, docs/tuning.md says where the tiles are from.
"""
