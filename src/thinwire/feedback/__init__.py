"""Feedback: what is done with the part that was not sent."""

from thinwire.feedback.base import Feedback as Feedback
from thinwire.feedback.base import Memory as Memory
from thinwire.feedback.base import Slot as Slot
from thinwire.feedback.ef21 import EF21 as EF21
from thinwire.feedback.error_feedback import ErrorFeedback as ErrorFeedback
from thinwire.feedback.momentum import MomentumCorrection as MomentumCorrection
