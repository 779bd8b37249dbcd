//! How a job reads the optimizer's state of a program from a checkpoint in which it lies in another
//! way: divided over the workers or not, of a module on a GPU or not. The manifest says what lies
//! where, by names.

use std::collections::BTreeMap;

use elasticdl_data::storage::Storage;

use super::load::{LoadError, check_size, read_tensors};
use super::manifest::{JobFingerprint, Manifest};
use super::rows;
use crate::external::StatePart;
use crate::tensors::is_finite;

impl Manifest {
    /// Checks that each part of the optimizer's state lies within it.
    pub(super) fn check_parts(&self) -> Result<(), String> {
        let is_within = |part: &StatePart| {
            part.at.checked_add(part.len).is_some_and(|end| end as u64 <= self.slots)
        };
        match self.parts.iter().find(|part| !is_within(part)) {
            Some(part) => Err(format!("{} is not within its optimizer's state", part.name)),
            None => Ok(()),
        }
    }

    /// Names what differs between the program that wrote the checkpoint and this one.
    pub(super) fn differences(&self, fingerprint: &JobFingerprint) -> Vec<String> {
        match (&self.program, &fingerprint.program) {
            (Some(wrote), Some(reads)) => {
                let mut names = wrote.differences(reads, ["then", "now"]);
                // Those of a program are a part of its state.
                if wrote.optimizer != reads.optimizer && !fingerprint.parts.is_empty() {
                    *names.last_mut().expect("the optimizer's are the last") +=
                        " (those in the checkpoint count)";
                }
                names
            }
            _ => Vec::new(),
        }
    }

    /// Checks that the job's optimizer can go on from this state.
    ///
    /// # Errors
    /// A message that explains what is different, and what is expected.
    pub(super) fn check_state(&self, fingerprint: &JobFingerprint) -> Result<(), String> {
        if self.lies_elsewhere(fingerprint)? {
            return Ok(());
        }
        let (slots, own) = (self.slots, fingerprint.slots as u64);
        if slots != own {
            return Err(format!(
                "its optimizer state has {slots} floats, and this one has {own}; both must use the \
                 same kind of optimizer"
            ));
        }
        let whole = self.optimizer.as_ref().map_or(0, |chunked| chunked.whole);
        if whole != fingerprint.whole as u64 {
            let had = if whole > 0 { "with" } else { "without" };
            return Err(format!(
                "it is of a program that was started {had} --shard-optimizer, and does not say \
                 what lies where in the optimizer's state; start this job {had} --shard-optimizer"
            ));
        }
        Ok(())
    }

    /// Whether the optimizer's state lies in another way than in the job, with the same parts.
    ///
    /// # Errors
    /// A message that names a part that differs, and says what is expected.
    pub(super) fn lies_elsewhere(&self, fingerprint: &JobFingerprint) -> Result<bool, String> {
        let (saved, own) = (&self.parts, &fingerprint.parts);
        if own.is_empty() || saved == own {
            return Ok(false);
        }
        if saved.is_empty() {
            return Err(
                "it does not say what lies where in the optimizer's state, as a program's \
                        of this version does"
                    .into(),
            );
        }
        let (saved_by_name, own_by_name) = (by_name(saved), by_name(own));
        if let Some(part) = saved.iter().find(|part| !own_by_name.contains_key(&*part.name)) {
            return Err(format!("its state has {}, and this job's has not; {SAME}", part.name));
        }
        for part in own {
            let Some(saved) = saved_by_name.get(&*part.name) else {
                // Such as a name for parameter groups, which older checkpoints do not have.
                if part.len == 0 {
                    continue;
                }
                return Err(format!("its state lacks {}, which this job's has; {SAME}", part.name));
            };
            if saved.len != part.len && part.fill.is_none() {
                return Err(format!(
                    "{} has {} floats in its state, and {} in this job's; {SAME}",
                    part.name, saved.len, part.len
                ));
            }
        }
        Ok(true)
    }

    /// Reads the optimizer's state, which [lies elsewhere](Self::lies_elsewhere) than in the job,
    /// into `slots`, the floats of the job's state from `first` on; and the parameters, if they are
    /// wanted.
    pub(super) fn read_parts(
        &self,
        folder: &Storage,
        fingerprint: &JobFingerprint,
        parameters: Option<&mut [f32]>,
        (first, slots): (usize, &mut [f32]),
    ) -> Result<(), LoadError> {
        // Before memory is allocated for what the manifest declares.
        let chunked = self.optimizer.iter().flat_map(|chunked| &chunked.files);
        let files = self.shards.iter().map(|shard| shard.bytes);
        let bytes: u64 = files.chain(chunked.map(|file| file.bytes)).fold(0, u64::saturating_add);
        self.shards.iter().try_for_each(|shard| check_size(folder, shard))?;
        if let Some(chunked) = &self.optimizer {
            rows::check_chunks(folder, &chunked.files)?;
        }
        if self.slots > bytes / 4 {
            let error = format!("its files of {bytes} bytes can't have {} floats", self.slots);
            return Err(LoadError::Damaged(error));
        }
        let mut saved = vec![0.0; self.slots as usize];
        read_tensors(folder, self, parameters, Some(&mut saved))?;
        // Between the parts as well.
        slots.fill(0.0);
        let by_name = by_name(&self.parts);
        for part in &fingerprint.parts {
            let at = part.at.checked_sub(first);
            let into = at.and_then(|at| slots.get_mut(at..at.checked_add(part.len)?));
            let Some(into) = into.filter(|into| !into.is_empty()) else { continue };
            let found = by_name.get(&*part.name).map_or(0..0, |from| from.at..from.at + from.len);
            let len = found.len().min(into.len());
            into[..len].copy_from_slice(&saved[found.start..found.start + len]);
            into[len..].fill(part.fill.unwrap_or_default());
        }
        match is_finite(slots) {
            true => Ok(()),
            false => Err(LoadError::Damaged("it contains a NaN or an infinity".into())),
        }
    }
}

fn by_name(parts: &[StatePart]) -> BTreeMap<&str, &StatePart> {
    parts.iter().map(|part| (&*part.name, part)).collect()
}

/// What a job that resumes must have.
const SAME: &str = "both must have the same optimizer, with the same settings, for the same \
                    parameters, and the same objects of job.state()";
