//! The division of the records of a job into steps of a fixed size.

/// The state that a job began with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begun {
    /// Steps that it contained.
    pub step: u64,
    /// Records that it had absorbed, over all epochs.
    pub records: u64,
}

/// The records of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecords {
    /// The step, from 1.
    pub step: u64,
    /// Its epoch.
    pub epoch: u32,
    /// First position in the epoch's order.
    pub start: u64,
    /// One past the last position.
    pub end: u64,
}

/// The division of a job's records into steps of a fixed size.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    begun: Begun,
    /// Records of an epoch.
    records: u64,
    /// Records of a step.
    batch: u64,
}

impl Steps {
    /// The steps of a job that began with this state.
    #[must_use]
    pub fn new(begun: Begun, records: u64, batch: u64) -> Self {
        Self { begun, records: records.max(1), batch: batch.max(1) }
    }

    /// The step that trains this position; `None` if the job began with a later state.
    #[must_use]
    pub fn of(self, epoch: u32, position: u64) -> Option<StepRecords> {
        let Self { begun, records, batch } = self;
        let (first, rest) = (begun.records / records, begun.records % records);
        let epochs = u64::from(epoch).checked_sub(first)?;
        // The steps of an epoch begin at its start, but for the one that the job began in.
        let from = if epochs == 0 { rest } else { 0 };
        let number = position.checked_sub(from)? / batch;
        let before = match epochs {
            0 => 0,
            _ => (records - rest).div_ceil(batch) + (epochs - 1) * records.div_ceil(batch),
        };
        let start = from + number * batch;
        let step = begun.step + before + number + 1;
        Some(StepRecords { step, epoch, start, end: records.min(start + batch) })
    }

    /// The records of `step`; `None` if the job began with a state that contains it.
    #[must_use]
    pub fn records_of(self, step: u64) -> Option<StepRecords> {
        let Self { begun, records, batch } = self;
        let (first, rest) = (begun.records / records, begun.records % records);
        let number = step.checked_sub(begun.step + 1)?;
        let in_first = (records - rest).div_ceil(batch);
        let (epoch, at) = match number.checked_sub(in_first) {
            None => (first, rest + number * batch),
            Some(later) => {
                let per_epoch = records.div_ceil(batch);
                (first + 1 + later / per_epoch, later % per_epoch * batch)
            }
        };
        self.of(u32::try_from(epoch).ok()?, at)
    }
}
