//! The checkpoints that a step can be made from.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use elasticdl_master::jobdir::complete_checkpoints;
use elasticdl_master::lineage::CompleteCheckpoint;

use super::origin::Origin;
use crate::commands::start::outputs::local;
use crate::process::{Failure, cannot};

/// The address that the training begins with: a folder of the job's checkpoints of fewer than
/// `step` steps, of which a worker takes the newest intact one. `None`: there is none.
///
/// `places`: folders of checkpoints, and checkpoints. `links`: the folder to make.
pub(super) fn before(
    step: u64,
    places: &[String],
    origin: Option<&Origin>,
    links: &Path,
) -> Result<Option<String>, Failure> {
    let mut found = Vec::new();
    for place in places {
        let mut there = all_in(place.trim_end_matches('/'), step)?;
        there.retain(|(known, _)| known.step < step);
        match origin {
            Some(origin) => origin.keep_own(&mut there),
            None => check_run(place, &there)?,
        }
        found.extend(there);
    }
    let Some((_, newest)) = found.iter().max_by_key(|(known, _)| known.step) else {
        return Ok(None);
    };
    if local(newest).is_none() {
        return Ok(Some(newest.clone()));
    }
    fs::create_dir(links).map_err(cannot(&format!("create {}", links.display())))?;
    for (known, address) in &found {
        let link = links.join(&known.name);
        // One that is in both places is linked once.
        if let (Some(path), false) = (local(address), link.is_symlink()) {
            symlink(path, &link).map_err(cannot(&format!("create {}", link.display())))?;
        }
    }
    Ok(Some(links.display().to_string()))
}

/// The checkpoints in `place`, or the one that it is, with their addresses.
fn all_in(place: &str, step: u64) -> Result<Vec<(CompleteCheckpoint, String)>, Failure> {
    let name = place.rsplit('/').next().unwrap_or_default();
    if let Some(known) = CompleteCheckpoint::parse(name) {
        return Ok(vec![(known, place.to_owned())]);
    }
    let folder = local(place).ok_or_else(|| {
        Failure::usage(format!(
            "--replay-step: an object store is not searched for checkpoints; name one of fewer \
             than {step} steps, as --resume-from {place}/step-…, and --checkpoint-dir none"
        ))
    })?;
    let address = |name: &str| folder.join(name).display().to_string();
    let there = complete_checkpoints(&folder).into_iter();
    Ok(there.map(|known| (known.clone(), address(&known.name))).collect())
}

/// Refuses a place with checkpoints of several jobs: which of them is meant is not known.
fn check_run(place: &str, there: &[(CompleteCheckpoint, String)]) -> Result<(), Failure> {
    let runs: BTreeSet<Option<&str>> = there.iter().map(|(known, _)| known.run()).collect();
    if runs.len() > 1 {
        return Err(Failure::usage(format!(
            "--replay-step: {place} holds checkpoints of {} jobs; name the job whose step it is \
             by --job-name or --job-dir",
            runs.len()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, names: &[&str]) {
        for name in names {
            fs::create_dir_all(folder.join(name)).unwrap();
            fs::write(folder.join(name).join("manifest.json"), "{}").unwrap();
        }
    }

    const FIRST: &str = "step-000000000002-0123abcd-g1";
    const SECOND: &str = "step-000000000004-0123abcd-g1";
    const OTHER: &str = "step-000000000003-89abcdef-g1";

    #[test]
    fn all_checkpoints_before_the_step_are_given_to_the_worker() {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, links) = (scratch.path().join("c"), scratch.path().join("links"));
        write(&folder, &[FIRST, SECOND, "step-000000000005-0123abcd-g1"]);
        let place = folder.display().to_string();
        assert_eq!(before(2, std::slice::from_ref(&place), None, &links).unwrap(), None);
        let from = before(5, &[place], None, &links).unwrap();
        assert_eq!(from, Some(links.display().to_string()));
        let mut linked: Vec<String> =
            complete_checkpoints(&links).into_iter().map(|known| known.name).collect();
        linked.sort();
        assert_eq!(linked, [FIRST, SECOND]);
    }

    #[test]
    fn checkpoints_of_several_jobs_in_a_folder_need_the_name_of_one() {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, links) = (scratch.path().join("c"), scratch.path().join("links"));
        write(&folder, &[FIRST, OTHER, SECOND]);
        let refused = before(5, &[folder.display().to_string()], None, &links).unwrap_err();
        assert!(refused.text.contains("checkpoints of 2 jobs"), "{}", refused.text);
    }
}
