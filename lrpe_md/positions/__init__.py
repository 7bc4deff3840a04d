"""Token positions on grids, in tables of coordinates, and in sequences with several parts."""

from .augment import AugmentPositions as AugmentPositions
from .coordinates import Coordinates as Coordinates
from .coordinates import PerAxis as PerAxis
from .coordinates import Rules as Rules
from .grid import Grid as Grid
from .grid import grid_coordinates as grid_coordinates
from .grid import offset_positions as offset_positions
from .grid import relative_times as relative_times
from .grid import window_order as window_order
from .sequences import After as After
from .sequences import Before as Before
from .sequences import Packed as Packed
from .sequences import Segment as Segment
from .sequences import Tokens as Tokens
from .sequences import compose as compose
from .sequences import pack as pack
from .sequences import packed_positions as packed_positions
from .sequences import pad as pad
from .sequences import zigzag as zigzag
