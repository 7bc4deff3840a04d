"""Frequencies: how far each channel rotates per unit of position.

``omega`` (H or 1, C, K) holds one frequency per head, channel (or pair) and axis, in radians per unit of position. In
an axial omega, each channel depends on a single axis. In a dense omega, each channel can depend on all axes. Results
are float64 by default, and differentiable with respect to tensor arguments.

omega is built from theta, a one-dimensional series of frequencies. The functions in :mod:`.scalings` change theta to
extend a trained model to longer inputs. :func:`axial_omega` then assigns each channel an axis, or :func:`dense_omega`
assigns each channel a direction.
"""

from .axial import AXIS_MAPS as AXIS_MAPS
from .axial import AXIS_ORDERS as AXIS_ORDERS
from .axial import AxisMap as AxisMap
from .axial import AxisOrder as AxisOrder
from .axial import axial_omega as axial_omega
from .axial import sequence_omega as sequence_omega
from .axial import split_channels as split_channels
from .dense import dense_omega as dense_omega
from .dense import golden_directions as golden_directions
from .dense import mixed_omega as mixed_omega
from .dense import plane_directions as plane_directions
from .dense import random_directions as random_directions
from .dense import simplex_directions as simplex_directions
from .rope_parameters import rope_frequencies as rope_frequencies
from .scalings import dynamic_ntk_scaling as dynamic_ntk_scaling
from .scalings import dype_ntk_scaling as dype_ntk_scaling
from .scalings import dype_yarn_scaling as dype_yarn_scaling
from .scalings import linear_scaling as linear_scaling
from .scalings import llama3_scaling as llama3_scaling
from .scalings import longrope_scaling as longrope_scaling
from .scalings import ntk_scaling as ntk_scaling
from .scalings import riflex_scaling as riflex_scaling
from .scalings import yarn_scaling as yarn_scaling
from .series import geometric_theta as geometric_theta
from .series import head_bands_theta as head_bands_theta
from .series import log_linspace_theta as log_linspace_theta
from .series import period_theta as period_theta
