"""Published schemes as data, with support for your own schemes."""

from .functions import FUNCTIONS as FUNCTIONS
from .registry import SCHEMES as SCHEMES
from .registry import list_presets as list_presets
from .registry import preset as preset
from .registry import register_scheme as register_scheme
from .scheme import Axial as Axial
from .scheme import Dense as Dense
from .scheme import Preset as Preset
from .scheme import Scaling as Scaling
from .scheme import Scheme as Scheme
