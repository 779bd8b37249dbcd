//! Whether all ranks of a new group run one program.
//!
//! The program that most trained ranks run is the group's; of a group without a state, that of most
//! ranks. A rank that runs another one fails, and the others go on. So no master has to remember
//! the program, and a new one has nothing to learn. A joiner that fetches the state learns the
//! group's program from its donor, and ends before it is a member.

use std::collections::{BTreeMap, BTreeSet};
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
    /// Digests of the source files of an interpreted program, by name: those that it has loaded.
    #[serde(default)]
    pub files: BTreeMap<String, u64>,
    /// Version of this library.
    pub version: String,
    /// Digest of the model's tensors and tables: names, shapes, and how rows begin.
    pub tensors: u64,
    /// Digest of the settings of the optimizer, and of those of rows.
    pub optimizer: u64,
}

impl Program {
    /// Names the parts in which the programs differ. `words`: when or where this program and the
    /// other one run, for the files that differ.
    pub fn differences(&self, other: &Self, words: [&str; 2]) -> Vec<String> {
        let parts = [
            (self.executable != other.executable, "executable".to_owned()),
            (self.files != other.files, self.differing_files(other, words)),
            (self.version != other.version, "version of elasticdl".to_owned()),
            (self.tensors != other.tensors, "tensors".to_owned()),
            (self.optimizer != other.optimizer, "optimizer settings".to_owned()),
        ];
        parts.into_iter().filter(|(differs, _)| *differs).map(|(_, part)| part).collect()
    }

    fn differing_files(&self, other: &Self, [mine, others]: [&str; 2]) -> String {
        let names: BTreeSet<&String> = self.files.keys().chain(other.files.keys()).collect();
        let mut texts = names.into_iter().filter_map(|name| {
            match (self.files.get(name), other.files.get(name)) {
                (Some(a), Some(b)) if a == b => None,
                (Some(a), Some(b)) => Some(format!("{name}: {a:016x} {mine}, {b:016x} {others}")),
                (Some(_), None) => Some(format!("{name}: only {mine}")),
                (None, _) => Some(format!("{name}: only {others}")),
            }
        });
        let mut text = texts.by_ref().take(FILES_NAMED).collect::<Vec<_>>().join("; ");
        match texts.count() {
            0 => {}
            more => text += &format!("; and {more} more"),
        }
        format!("Python sources ({text})")
    }
}

impl Origin {
    /// Checks that this is the origin of a worker that runs the program of its group.
    ///
    /// # Errors
    /// It runs another one.
    pub(super) fn check(&self, group: &Program) -> Result<(), ProgramMismatch> {
        match group.differences(&self.program, ["in its group", "here"]) {
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
    pub differences: Vec<String>,
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
    let counted = headers.iter().filter(|header| has_trained(header) || !any_trained);
    let mut programs: Vec<(&Program, usize)> = Vec::new();
    for program in counted.map(|header| &header.origin.program) {
        match programs.iter_mut().find(|(other, _)| *other == program) {
            Some((_, count)) => *count += 1,
            None => programs.push((program, 1)),
        }
    }
    // Of equally frequent ones, that of the lowest rank.
    programs.into_iter().rev().max_by_key(|(_, count)| *count).map(|(program, _)| program)
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

/// Number of files that a text names.
const FILES_NAMED: usize = 5;

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

    #[test]
    fn the_files_that_differ_are_named_with_their_digests_and_some_of_many() {
        let program = |files: &[(&str, u64)]| Program {
            files: files.iter().map(|&(name, digest)| (name.into(), digest)).collect(),
            ..Program::default()
        };
        let group = program(&[("same.py", 7), ("train.py", 1), ("old.py", 3)]);
        let mine = program(&[("same.py", 7), ("train.py", 0x2f), ("new.py", 4)]);
        let expected = "Python sources (new.py: only here; old.py: only there; train.py: \
                        0000000000000001 there, 000000000000002f here)";
        assert_eq!(group.differences(&mine, ["there", "here"]), [expected]);
        let names: Vec<String> = (0..8).map(|i| format!("{i}.py")).collect();
        let many: Vec<(&str, u64)> = names.iter().map(|name| (&**name, 1)).collect();
        let differences = program(&[]).differences(&program(&many), ["there", "here"]);
        assert!(differences[0].ends_with("4.py: only here; and 3 more)"), "{differences:?}");
    }
}
