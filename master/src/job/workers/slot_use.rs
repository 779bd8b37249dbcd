//! How a launch uses its slot.

/// How a launch uses its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// It keeps its slot: no replacement starts there.
    #[default]
    Kept,
    /// It leaves in order, so its replacement may start while it still runs.
    Leaving,
    /// It leaves because of a scale down, so nothing replaces it.
    Retired {
        /// Whether it also is leaving.
        leaving: bool,
    },
}

impl SlotUse {
    /// As it was persisted.
    pub(crate) fn restored(is_leaving: bool, is_retired: bool) -> Self {
        match (is_retired, is_leaving) {
            (true, leaving) => Self::Retired { leaving },
            (false, true) => Self::Leaving,
            (false, false) => Self::Kept,
        }
    }

    /// Whether it leaves in order.
    pub(super) fn is_leaving(self) -> bool {
        matches!(self, Self::Leaving | Self::Retired { leaving: true })
    }

    /// As it is when the launch leaves in order.
    pub(super) fn leave(self) -> Self {
        match self {
            Self::Kept | Self::Leaving => Self::Leaving,
            Self::Retired { .. } => Self::Retired { leaving: true },
        }
    }

    /// As it is when nothing replaces the launch.
    pub(super) fn retire(self) -> Self {
        Self::Retired { leaving: self.is_leaving() }
    }
}
