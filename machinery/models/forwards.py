"""What a model's forward takes beside ids and a mask: in model_folders."""

from machinery.models.model_folders import accepted as accepted
from machinery.models.model_folders import mask_for as mask_for
from machinery.models.model_folders import picks_positions as picks_positions
