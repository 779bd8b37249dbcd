//! Checks that a job of this machine writes none of its own files into the data that it reads, nor
//! over other files of the job. The worker that describes the data checks the outputs of the
//! program.

use std::ffi::OsStr;
use std::iter;
use std::path::{Path, PathBuf};

use elasticdl_master::job::{JobSpec, Work};
use elasticdl_master::jobdir::neighbours::{RunningJob, job_around, running_jobs, stores};
use elasticdl_master::jobdir::{default_root, is_own_file};
use elasticdl_proto::split_sources;

use super::local_job::LocalJob;
use crate::process::Failure;

impl LocalJob {
    /// Checks the job's directory, its summary and its events for TensorBoard.
    pub(super) fn check_outputs(&self) -> Result<(), Failure> {
        let outputs = [
            ("--job-dir", Some(&self.job_dir)),
            ("--summary", self.summary.as_ref()),
            ("--tensorboard-dir", self.tensorboard_dir.as_ref()),
        ];
        for (option, output) in outputs {
            let Some(output) = output else { continue };
            if let Some(data) = data_around(&self.spec, output) {
                return Err(Failure::usage(format!(
                    "{option} {}: it is within the data {data}, and would be read as data; choose \
                     a place outside of it",
                    output.display()
                )));
            }
        }
        if let Some(text) = replaces_program(&self.spec, self.summary.as_deref(), &self.program) {
            return Err(Failure::usage(text));
        }
        if let Some(text) = overwritten(&self.spec, self.summary.as_deref(), &self.job_dir) {
            return Err(Failure::usage(text));
        }
        self.check_running_jobs()
    }

    /// Checks that no output is a file of another job.
    pub(super) fn check_running_jobs(&self) -> Result<(), Failure> {
        self.check_other_jobs(&running_jobs(&default_root()))
    }

    /// As [`Self::check_running_jobs`], of the jobs `running`.
    fn check_other_jobs(&self, running: &[RunningJob]) -> Result<(), Failure> {
        let own = resolved(&self.job_dir);
        for Output { option, address } in outputs(&self.spec, self.summary.as_deref()) {
            let path = local(&address).and_then(|path| resolved(&path));
            if let Some(other) =
                path.as_deref().and_then(job_around).filter(|o| Some(o) != own.as_ref())
            {
                return Err(Failure::usage(format!(
                    "{option} {address}: it is within the directory of another job, {}; choose a \
                     place outside of it",
                    other.display()
                )));
            }
            for job in running.iter().filter(|job| Some(&job.root) != own.as_ref()) {
                let is_same = |other: &Output| match &path {
                    Some(path) => {
                        local(&other.address).and_then(|other| resolved(&other)).as_ref()
                            == Some(path)
                    }
                    None => other.address == address && job.stores == stores(),
                };
                let others = outputs(&job.spec, job.summary.as_deref());
                if let Some(other) = others.iter().find(|other| is_same(other)) {
                    return Err(Failure::usage(format!(
                        "{option} {address}: it is the file of {} of the job {}, which runs in {}; \
                         choose another name, or stop that job first",
                        other.option,
                        job.spec.name,
                        job.root.display()
                    )));
                }
            }
        }
        self.check_other_checkpoints(running, own.as_deref())
    }

    /// Checks that no running job keeps its checkpoints in the same folder.
    fn check_other_checkpoints(
        &self,
        running: &[RunningJob],
        own: Option<&Path>,
    ) -> Result<(), Failure> {
        let Some(kept) = &self.spec.options.checkpoints else { return Ok(()) };
        let place = |dir: &str| match local(dir) {
            Some(path) => resolved(&path),
            None => Some(dir.trim_end_matches('/').into()),
        };
        let is_same = |job: &&RunningJob| {
            let other = job.spec.options.checkpoints.as_ref().and_then(|other| place(&other.dir));
            let is_here = local(&kept.dir).is_some() || job.stores == stores();
            Some(&*job.root) != own && is_here && other.is_some() && other == place(&kept.dir)
        };
        match running.iter().find(is_same) {
            None => Ok(()),
            Some(job) => Err(Failure::usage(format!(
                "--checkpoint-dir {}: the job {}, which runs in {}, keeps its checkpoints there, \
                 too, and a later job would start from the newest of both; choose another folder, \
                 or stop that job first",
                kept.dir,
                job.spec.name,
                job.root.display()
            ))),
        }
    }
}

/// A file that a job writes at its end.
struct Output {
    option: &'static str,
    address: String,
}

/// The files that a job writes at its end.
fn outputs(spec: &JobSpec, summary: Option<&Path>) -> Vec<Output> {
    let export = match &spec.options.work {
        Work::Train { export } => export.clone(),
        Work::Evaluate { .. } | Work::Predict { .. } => None,
    };
    let best =
        spec.options.validation.as_ref().and_then(|validation| validation.export_best.clone());
    let summary = summary.map(|path| path.display().to_string());
    let all = [("--summary", summary), ("--export", export), ("--export-best", best)];
    let given = all.into_iter().filter_map(|(option, address)| Some((option, address?)));
    given.map(|(option, address)| Output { option, address }).collect()
}

/// Why an output would replace the job's program.
fn replaces_program(spec: &JobSpec, summary: Option<&Path>, program: &Path) -> Option<String> {
    let export = match &spec.options.work {
        Work::Evaluate { .. } | Work::Predict { .. } => None,
        Work::Train { export } => export.as_deref().and_then(local),
    };
    let best =
        spec.options.validation.as_ref().and_then(|validation| validation.export_best.as_deref());
    let outputs = [
        ("--summary", summary.map(Path::to_owned)),
        ("--export", export),
        ("--export-best", best.and_then(local)),
    ];
    let program = resolved(program)?;
    let (option, file) = outputs
        .into_iter()
        .filter_map(|(option, file)| Some((option, file?)))
        .find(|(_, file)| resolved(file).as_ref() == Some(&program))?;
    Some(format!("{option} {}: it is the program; choose another name", file.display()))
}

/// The path that an address names on this machine.
pub(super) fn local(address: &str) -> Option<PathBuf> {
    let is_local = address.starts_with("file://") || !address.contains("://");
    is_local.then(|| PathBuf::from(address.strip_prefix("file://").unwrap_or(address)))
}

/// Why an output would replace another file of the job.
fn overwritten(spec: &JobSpec, summary: Option<&Path>, job_dir: &Path) -> Option<String> {
    let (export, model) = match &spec.options.work {
        Work::Evaluate { model } | Work::Predict { model, .. } => (None, local(model)),
        Work::Train { export } => (export.as_deref().and_then(local), None),
    };
    let best =
        spec.options.validation.as_ref().and_then(|validation| validation.export_best.as_deref());
    let best = best.and_then(local);
    let same = |path: &Path| match (resolved(path), summary.and_then(resolved)) {
        (Some(one), Some(other)) => one == other,
        _ => false,
    };
    let others = [("--export", &export), ("--export-best", &best), ("--model", &model)];
    if let (Some(summary), Some((option, _))) =
        (summary, others.iter().find(|(_, file)| file.as_ref().is_some_and(|file| same(file))))
    {
        return Some(format!(
            "--summary {}: it is the file of {option}, too; give each a file of its own",
            summary.display()
        ));
    }
    let kept = |best: &PathBuf| {
        let (best, summary) = (resolved(best)?, resolved(summary?)?);
        let rest = summary.to_str()?.strip_prefix(best.to_str()?)?;
        Some(rest == ".previous" || rest.starts_with(".previous."))
    };
    if let (Some(summary), Some(true)) = (summary, best.as_ref().and_then(kept)) {
        return Some(format!(
            "--summary {}: a file that --export-best replaces is kept there; choose another place",
            summary.display()
        ));
    }
    let own = |file: &Path| {
        let file = resolved(file)?;
        let name = file.file_name()?;
        let is_own = file.parent() == resolved(job_dir).as_deref() && is_own_file(name);
        is_own.then(|| name.to_string_lossy().into_owned())
    };
    let files = [
        ("--summary", summary),
        ("--export", export.as_deref()),
        ("--export-best", best.as_deref()),
    ];
    for (option, file) in files {
        let Some(file) = file else { continue };
        if let Some(name) = own(file).filter(|name| option != "--summary" || name != "summary.json")
        {
            return Some(format!(
                "{option} {}: the job keeps its own file {name} there; choose another name",
                file.display()
            ));
        }
        let folder = file.parent().unwrap_or_else(|| Path::new(""));
        if option == "--summary" && folder.join("manifest.json").is_file() && is_checkpoint(folder)
        {
            return Some(format!(
                "{option} {}: it is within a checkpoint, with which it would be removed; choose \
                 a place outside of it",
                file.display()
            ));
        }
    }
    None
}

fn is_checkpoint(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("step-"))
}

/// The data of a job within which `output` lies, if it lies within any.
fn data_around<'a>(spec: &'a JobSpec, output: &Path) -> Option<&'a str> {
    let output = resolved(output)?;
    let validation =
        spec.options.validation.iter().flat_map(|validation| split_sources(&validation.data));
    let sources = split_sources(&spec.options.training_data).chain(validation);
    // A pair of files is written with a comma between them.
    sources.flat_map(|source| iter::once(source).chain(source.split(','))).find(|data| {
        let path = Path::new(data.strip_prefix("file://").unwrap_or(data));
        let within = resolved(folder_of(path)).filter(|path| path.exists());
        let within = within.as_ref().and_then(|data| output.strip_prefix(data).ok());
        // Readers leave names out that begin with a dot.
        within
            .is_some_and(|path| !path.iter().any(|part| part.as_encoded_bytes().starts_with(b".")))
    })
}

/// The folder of a pattern that all files fit, such as `data/*`; another path itself.
fn folder_of(source: &Path) -> &Path {
    let mut parts = source.components();
    let is_any = |part: &OsStr| part == "*" || part == "**";
    while !source.exists() && parts.clone().next_back().is_some_and(|last| is_any(last.as_os_str()))
    {
        parts.next_back();
    }
    Some(parts.as_path())
        .filter(|path| !path.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."))
}

/// An absolute path without links, as far as it exists.
fn resolved(path: &Path) -> Option<PathBuf> {
    let whole = std::path::absolute(path).ok()?;
    let (exists, rest) = whole.ancestors().find_map(|ancestor| {
        let rest = whole.strip_prefix(ancestor).expect("it begins with its ancestors");
        Some((ancestor.canonicalize().ok()?, rest))
    })?;
    Some(exists.join(rest).components().collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use elasticdl_master::job::{JobSpec, ValidationSpec};
    use elasticdl_master::jobdir::JobDir;

    use elasticdl_proto::WorkerOptions;

    use super::*;
    use crate::commands::parse_start;

    fn spec() -> JobSpec {
        let request = parse_start("train --local --training-data d -- true").unwrap();
        request.spec("j".into(), |_, path| Ok(path.into())).unwrap()
    }

    #[test]
    fn no_output_replaces_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("train");
        std::fs::write(&program, "#!/bin/sh").unwrap();
        let other = folder.path().join("train.json");
        let mut spec = spec();
        assert_eq!(replaces_program(&spec, Some(&other), &program), None);
        let text = replaces_program(&spec, Some(&program), &program).unwrap();
        assert!(text.starts_with("--summary ") && text.contains("it is the program"), "{text}");
        spec.options.work = Work::Train { export: Some(format!("file://{}", program.display())) };
        let text = replaces_program(&spec, None, &program).unwrap();
        assert!(text.starts_with("--export "), "{text}");
    }

    #[test]
    fn a_summary_that_would_replace_a_model_or_a_file_of_the_job_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let text = |name: &str| at(name).to_str().unwrap().to_owned();
        let job_dir = at("job");
        let found = |work: Work, summary: &str| {
            let spec = JobSpec { options: WorkerOptions { work, ..spec().options }, ..spec() };
            overwritten(&spec, Some(&at(summary)), &job_dir).unwrap_or_default()
        };
        let train = |export: &str| Work::Train { export: Some(text(export)) };
        let evaluate = |model: &str| Work::Evaluate { model: text(model) };
        assert_eq!(found(train("m"), "s.json"), "");
        assert_eq!(found(train("job/model.safetensors"), "job/summary.json"), "");
        assert!(found(train("m"), "./m").contains("it is the file of --export, too"));
        assert!(found(evaluate("m"), "m").contains("it is the file of --model, too"));
        assert!(found(train("m"), "job/record.json").contains("its own file record.json"));
        assert!(found(train("job/summary.json"), "s").contains("--export "));
        let checkpoint = at("step-000000000007-0123abcd-g1");
        std::fs::create_dir(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("manifest.json"), "{}").unwrap();
        let within = "step-000000000007-0123abcd-g1/manifest.json";
        assert!(found(train("m"), within).contains("within a checkpoint"));
    }

    #[test]
    fn files_of_other_jobs_are_refused_with_the_name_of_the_job() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name).to_str().unwrap().to_owned();
        let job = |name: &str, options: &str| {
            let dir = at(name);
            let line = format!(
                "train --local --job-name {name} --job-dir {dir} --training-data d {options} -- \
                 true"
            );
            LocalJob::new(parse_start(&line).unwrap())
        };
        let first =
            job("a", &format!("--export {} --checkpoint-dir {}", at("m"), at("c"))).unwrap();
        drop(JobDir::create(&first.job_dir).unwrap());
        let running = |stores| RunningJob {
            root: root.join("a"),
            spec: first.spec.clone(),
            summary: None,
            stores,
        };
        let others = [running(stores())];
        let refused = |options: &str| {
            let checked = job("b", options).and_then(|job| job.check_other_jobs(&others));
            checked.err().map(|failure| failure.text).unwrap_or_default()
        };
        assert_eq!(refused(&format!("--export {}", at("n"))), "");
        let text = refused(&format!("--export {}", at("a/../m")));
        assert!(text.contains("it is the file of --export of the job a, which runs in "), "{text}");
        assert!(refused(&format!("--summary {}", at("m"))).contains("of the job a"));
        let text = refused(&format!("--summary {}", at("a/summary.json")));
        assert!(text.contains("within the directory of another job"), "{text}");
        let text = refused(&format!("--checkpoint-dir {}/", at("c")));
        assert!(text.contains("the job a, which runs in "), "{text}");
        // Buckets of one name in different stores are different places.
        let mut spec = first.spec.clone();
        spec.options.checkpoints.as_mut().unwrap().dir = "s3://bucket/c".into();
        let elsewhere = BTreeSet::from(["http://127.0.0.1:1".to_owned()]);
        for (stores, is_same) in [(stores(), true), (elsewhere, false)] {
            let others = [RunningJob { spec: spec.clone(), ..running(stores) }];
            let job = job("b", "--checkpoint-dir s3://bucket/c/").unwrap();
            assert_eq!(job.check_other_jobs(&others).is_err(), is_same);
        }
        // The job that it replaces is its own.
        let again = job("a", &format!("--export {}", at("m")));
        assert!(again.and_then(|again| again.check_other_jobs(&others)).is_ok());
    }

    #[test]
    fn outputs_within_the_training_or_validation_data_are_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("train/deep")).unwrap();
        for name in ["test", "wild", "images", "labels"] {
            std::fs::create_dir(root.join(name)).unwrap();
        }
        std::os::unix::fs::symlink(root.join("train/deep"), root.join("link")).unwrap();
        let at = |path: &str| root.join(path).to_str().unwrap().to_owned();
        let validation = ValidationSpec {
            data: at("test"),
            every: None,
            metric: "loss".into(),
            highest: false,
            patience: None,
            split: None,
            export_best: None,
        };
        let spec = JobSpec {
            options: WorkerOptions {
                training_data: elasticdl_proto::join_sources(&[
                    at("none"),
                    at("train"),
                    at("wild/*"),
                    at("wild/*.csv"),
                    format!("{},{}", at("images"), at("labels")),
                ]),
                validation: Some(validation),
                ..spec().options
            },
            ..spec()
        };
        let found = |output: &str| data_around(&spec, &root.join(output)).map(str::to_owned);
        for output in ["train", "train/job", "link/job", "train/../train/job/x"] {
            assert_eq!(found(output), Some(at("train")), "{output}");
        }
        assert_eq!(found("test/summary.json"), Some(at("test")));
        assert_eq!(found("wild/tb"), Some(at("wild/*")));
        assert_eq!(found("labels/tb"), Some(at("labels")));
        for output in ["job", "training", "train/.job", "none/job"] {
            assert_eq!(found(output), None, "{output}");
        }
    }
}
