//! Whether all ranks of a new group run one program.
//!
//! The program that most trained ranks run is the group's; of a group without a state, that of most
//! ranks. A rank that runs another one fails, and the others go on. So no master has to remember
//! the program, and a new one has nothing to learn. A joiner that fetches the state learns the
//! group's program from its donor, and ends before it is a member.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::session::header::SyncHeader;

/// Where a rank runs, and what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the host.
    pub host: String,
    pub program: Program,
    /// Whether the rank is a table server: it holds rows, and computes no records.
    pub serves_tables: bool,
}

/// Identifies a program and its settings. The digests are 0 where they are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Digest of the executable.
    pub executable: u64,
    /// Digest of the sources of an interpreted program.
    pub sources: u64,
    /// Version of this library.
    pub version: String,
    /// Digest of the model's tensors and tables: names, shapes, and how rows begin.
    pub tensors: u64,
    /// Digest of the settings of the optimizer, and of those of rows.
    pub optimizer: u64,
}

impl Program {
    /// Names the parts in which the programs differ.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let parts = [
            (self.executable != other.executable, "executable"),
            (self.sources != other.sources, "Python sources"),
            (self.version != other.version, "version of elasticdl"),
            (self.tensors != other.tensors, "tensors"),
            (self.optimizer != other.optimizer, "optimizer settings"),
        ];
        parts.into_iter().filter(|(differs, _)| *differs).map(|(_, part)| part).collect()
    }
}

impl Origin {
    /// Checks that this is the origin of a worker that runs the program of its group.
    ///
    /// # Errors
    /// It runs another one.
    pub(super) fn check(&self, group: &Program) -> Result<(), ProgramMismatch> {
        match group.differences(&self.program) {
            differences if differences.is_empty() => Ok(()),
            differences => Err(ProgramMismatch { host: self.host.clone(), differences }),
        }
    }
}

/// A rank runs another program than its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramMismatch {
    /// Where the rank runs.
    pub host: String,
    /// The parts of the program that differ.
    pub differences: Vec<&'static str>,
}

impl fmt::Display for ProgramMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = if self.host.is_empty() { String::new() } else { format!(" on {}", self.host) };
        write!(
            f,
            "this worker{host} runs another build than its group, and takes no part: it differs in \
             its {}; all workers of a job must run one build (a tag that has moved? files that \
             have changed?), unless --allow-mixed-builds is set",
            self.differences.join(" and its ")
        )
    }
}

/// The program of a group, by the headers of all ranks.
pub(super) fn of_group(headers: &[SyncHeader]) -> Option<&Program> {
    let has_trained = |header: &SyncHeader| header.state.is_some_and(|state| state.was_in_group);
    let any_trained = headers.iter().any(has_trained);
    let programs: Vec<&Program> = headers
        .iter()
        .filter(|header| has_trained(header) || !any_trained)
        .map(|header| &header.origin.program)
        .collect();
    let count = |program: &Program| programs.iter().filter(|&&other| other == program).count();
    // Of equally frequent ones, that of the lowest rank.
    programs.iter().rev().copied().max_by_key(|program| count(program))
}

/// Checks that the rank of this origin runs the group's program.
///
/// # Errors
/// It runs another one.
pub(super) fn check(headers: &[SyncHeader], mine: &Origin) -> Result<(), ProgramMismatch> {
    of_group(headers).map_or(Ok(()), |group| mine.check(group))
}

/// Drops the states of ranks that run another program than the group: those ranks leave.
pub(super) fn without_other_programs(headers: &[SyncHeader]) -> Vec<SyncHeader> {
    let group = of_group(headers);
    let fits = |header: &SyncHeader| Some(&header.origin.program) == group;
    headers
        .iter()
        .map(|header| SyncHeader { state: header.state.filter(|_| fits(header)), ..header.clone() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::header::StateHeader;

    fn header(executable: u64, step: Option<u64>) -> SyncHeader {
        let state = |step| StateHeader { step, digest: 1, has_result: true, was_in_group: true };
        let program = Program { executable, optimizer: 3, ..Program::default() };
        let origin = Origin { host: "node-7".into(), program, ..Origin::default() };
        SyncHeader { state: step.map(state), origin, ..SyncHeader::default() }
    }

    /// Ranks that would fail.
    fn refused(headers: &[SyncHeader]) -> Vec<usize> {
        let is_refused = |&rank: &usize| check(headers, &headers[rank].origin).is_err();
        (0..headers.len()).filter(is_refused).collect()
    }

    #[test]
    fn a_rank_of_another_build_takes_no_part_and_the_trained_ones_decide() {
        assert_eq!(refused(&[header(1, None), header(1, None)]), [0; 0]);
        assert_eq!(refused(&[header(1, None), header(2, None)]), [1]);
        // The first worker is the odd one.
        assert_eq!(refused(&[header(2, None), header(1, None), header(1, None)]), [0]);
        // One trained rank, and replacements of a moved tag.
        assert_eq!(refused(&[header(2, None), header(1, Some(4)), header(2, None)]), [0, 2]);
        let states =
            without_other_programs(&[header(2, Some(9)), header(1, Some(4)), header(1, Some(4))]);
        assert_eq!(
            states.iter().map(|h| h.state.is_some()).collect::<Vec<_>>(),
            [false, true, true]
        );
    }

    #[test]
    fn the_text_names_the_host_and_what_differs() {
        let mut other = header(2, None).origin;
        other.program.optimizer = 4;
        let error = check(&[header(1, Some(4))], &other).unwrap_err().to_string();
        let expected = "on node-7 runs another build than its group, and takes no part: it \
                        differs in its executable and its optimizer settings;";
        assert!(error.contains(expected), "{error}");
    }
}
