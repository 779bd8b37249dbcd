//! Runs the master of a local job in this process, to the end of the job.

use std::fs::File;
use std::io::{self, IsTerminal as _, stderr};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use elasticdl_master::event_loop::JobResult;
use elasticdl_master::job::{JobSpec, Outcome};
use elasticdl_master::jobdir::neighbours::{Turn, stores, take_turn};
use elasticdl_master::jobdir::{self, JobDir, JobStart, StartTime, directory_of};
use elasticdl_master::local_master::{LocalEnd, LocalMaster, Stop};
use elasticdl_master::panics::end_process_on_panic;
use elasticdl_master::progress::Progress;
use elasticdl_master::worker_output::WorkerOutput;
use elasticdl_proto::{LogFormat, LogLines, LogSource};
use tracing::warn;
use tracing_subscriber::fmt::time::SystemTime;

use super::local_job::LocalJob;
use super::request::StartRequest;
use crate::process::{
    BLOCKED_MAX, Console, EXIT_FAILED, EXIT_OK, EXIT_USAGE, Failure, cannot, code_of_summary,
    new_runtime, print_error, print_warning, raise_open_files,
};
use crate::progress::ProgressPrinter;
use crate::render::{Paths, print_job_error, print_summary, warnings};

/// Runs a new job. Returns the exit code.
pub(super) fn start(request: StartRequest) -> Result<u8, Failure> {
    let mut job = LocalJob::new(request)?;
    job.refuse_to_replace()?;
    if job.job_dir.to_str().is_none() {
        let dir = job.job_dir.display();
        let text = format!("the job's directory, {dir}, is not UTF-8; choose another --job-dir");
        return Err(Failure::usage(text));
    }
    let is_new = !job.job_dir.exists();
    let dir = JobDir::create(&job.job_dir).map_err(|e| Failure::usage(e.to_string()))?;
    job.keep_checkpoints_in(dir.path());
    let (console, root, mut has_run) = (job.console, dir.path().to_path_buf(), false);
    let wanted = job.summary.clone();
    // Of several jobs that are started together, each one finds those before it.
    let turn = take_turn(&jobdir::default_root());
    let checked = job.check_running_jobs();
    let ended = checked
        .and_then(|()| master_of(job, turn))
        .and_then(|job| run(job, wanted, &dir, console, &mut has_run));
    if ended.is_err() && !has_run {
        dir.restore_earlier();
    }
    if ended.is_err() && is_new && !has_run && !jobdir::has_begun(&root) {
        // Nothing of a job that was refused stays, and `elasticdl list` does not show it.
        drop(dir);
        let _ = jobdir::delete(&root);
    }
    ended
}

/// Resumes the job whose master has died. Returns the exit code.
pub(super) fn resume(job: &Path, console: Console) -> Result<u8, Failure> {
    let (dir, abandoned) =
        JobDir::resume(&directory_of(job)).map_err(|e| Failure::usage(e.to_string()))?;
    // Relative paths in the job's options and in its program's arguments keep their meaning.
    let folder = &abandoned.start.folder;
    std::env::set_current_dir(folder).map_err(|e| {
        Failure::usage(format!(
            "can't go to {}, where the job was started: {e}",
            Path::new(folder).display()
        ))
    })?;
    let wanted = abandoned.start.summary.clone().map(PathBuf::from);
    run(LocalMaster::resume(abandoned), wanted, &dir, console, &mut false)
}

/// `wanted`: path of the additional summary. `has_run`: set when the job has ended, whatever can't
/// be written after it.
fn run(
    job: LocalMaster,
    wanted: Option<PathBuf>,
    dir: &JobDir,
    console: Console,
    has_run: &mut bool,
) -> Result<u8, Failure> {
    let LocalEnd { result: ended, stop, standstill } = lead(job, dir, console)?;
    *has_run = true;
    let is_replaced = dir.owner().is_replaced();
    if is_replaced {
        let dir = dir.path().display();
        print_warning(&format!(
            "{dir} was removed or renamed while the job ran, and is now that of another job: the \
             summary of this one is not written there"
        ));
    } else {
        // No worker is started from here on. The copy need not exist, and leaves room for the
        // summary.
        let _ = std::fs::remove_file(dir.program_path());
    }
    // What was refused replaces no result of an earlier job.
    let wanted = wanted.filter(|path| ended.outcome != Outcome::InvalidInput || !path.exists());
    let own = (!is_replaced).then(|| dir.summary_path());
    let written = write_summaries(own.as_deref(), wanted.as_deref(), &ended);
    standstill.end_process_on_signal();
    let has_trained = ended.summary.steps > 0 || ended.summary.records.counted > 0;
    let refused = if is_replaced {
        None
    } else if has_trained {
        dir.forget_earlier();
        None
    } else {
        dir.restore_earlier()
    };
    let (logs, own) = match &refused {
        Some(folder) => (folder.join("logs"), Some(folder.join("summary.json"))),
        None => (dir.logs(), own),
    };
    let summary = wanted.or(own);
    let paths = Paths { logs: (!is_replaced).then_some(&*logs), summary: summary.as_deref() };
    print_summary(console, &ended.summary, paths);
    if let Some(error) = &ended.summary.error {
        // With --quiet the table, which names the folder of the logs, is not printed. A refusal of
        // several lines quotes a log.
        let has_log = ended.outcome == Outcome::Failed || error.contains('\n');
        let with_logs = console.quiet && has_log;
        let error = if with_logs { add_logs(error, &logs) } else { error.clone() };
        print_job_error(console, ended.summary.wall_s, &error);
    }
    let has_table = console.progress() == Some(LogFormat::Text);
    let warnings = warnings(&ended.summary, has_table);
    warnings.iter().for_each(|warning| print_warning(warning));
    if ended.outcome == Outcome::Stopped && ended.summary.error.is_none() && !is_replaced {
        for model in dir.unexported_models() {
            let model = model.display();
            print_warning(&format!("a model was not exported to its place: it is in {model}"));
        }
    }
    if let Some(folder) = refused {
        print_warning(&format!(
            "this job did not start, and the earlier job in {} is as it was; the files of this one \
             are in {}",
            dir.path().display(),
            folder.display()
        ));
    }
    written?;
    Ok(match ended.outcome {
        Outcome::Completed => EXIT_OK,
        Outcome::Failed => EXIT_FAILED,
        Outcome::InvalidInput => EXIT_USAGE,
        Outcome::Stopped => match code_of_summary(&ended.summary) {
            // A policy of the user's stopped it.
            EXIT_OK if ended.summary.stop_reason.is_some() => EXIT_OK,
            EXIT_OK => stop.unwrap_or(Stop::Interrupted).exit_code(),
            lost => lost,
        },
    })
}

/// Leads the job in `dir` to its end, and shows it. What background tasks hold is dropped then.
pub(super) fn lead(job: LocalMaster, dir: &JobDir, console: Console) -> Result<LocalEnd, Failure> {
    log_to_file(dir, job.spec())?;
    end_process_on_panic((console.format == LogFormat::Json).then_some(print_error));
    raise_open_files();
    let runtime = new_runtime()?;
    let shows_link = console.progress() == Some(LogFormat::Text) && stderr().is_terminal();
    // Signals are handled on this thread: one that waits for a disk that hangs handles none.
    let run =
        || runtime.block_on(job.run(dir, || progress(dir, console), shows_link, print_warning));
    let led = thread::scope(|scope| scope.spawn(run).join());
    // A name server that does not answer delays no end.
    runtime.shutdown_timeout(BLOCKED_MAX);
    led.unwrap_or_else(|panicked| resume_unwind(panicked))
}

/// The master of a new job.
pub(super) fn master_of(job: LocalJob, turn: Option<Turn>) -> Result<LocalMaster, Failure> {
    let folder = std::env::current_dir().map_err(cannot("learn the current directory"))?;
    let start = JobStart {
        program: job.program.into(),
        args: job.args,
        summary: job.summary.map(|path| folder.join(path).into()),
        tensorboard_dir: job.tensorboard_dir.map(|path| folder.join(path).into()),
        folder: folder.into(),
        address: SocketAddr::new(job.listen, 0),
        metrics: job.metrics,
        dashboard: job.dashboard,
        master_timeout: job.master_timeout,
        stores: stores(),
        hosts: job.hosts,
        began: StartTime::now(),
        copy: None,
    };
    Ok(LocalMaster::new(job.spec, start, turn))
}

/// Shows the job in `dir` as the user wants.
fn progress(dir: &JobDir, console: Console) -> Progress {
    match console.progress() {
        Some(format) => {
            let output = WorkerOutput::from_now(dir.logs(), !console.tee);
            Progress::shown_by(ProgressPrinter::on_stderr(format, Some(output)))
        }
        None => Progress::quiet(),
    }
}

/// Directs the master's log to its file: one line per change of state.
fn log_to_file(dir: &JobDir, spec: &JobSpec) -> Result<(), Failure> {
    let path = dir.master_log();
    // Appends to the log of earlier masters of this job; a new job starts with an empty log.
    let file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| Failure::usage(format!("can't write {}: {e}", path.display())))?;
    // A line that does not fit on the disk is lost. The subscriber would report that by
    // `eprintln!`, which panics if no process reads standard error either.
    let run_id = Some(dir.token().run_id().to_string());
    let source = LogSource { job: Some(spec.name.clone()), run_id, worker: None };
    let logging = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(Mutex::new(file))
        .log_internal_errors(false)
        .event_format(LogLines::new(spec.log_format, source, SystemTime))
        .try_init();
    // A test in this process may have set another subscriber.
    if let Err(error) = logging {
        warn!(%error, "the master's log is not written");
    }
    Ok(())
}

/// The error, with the folder of the logs.
fn add_logs(error: &str, logs: &Path) -> String {
    let separator = if error.contains('\n') { '\n' } else { ' ' };
    format!("{error}{separator}(logs: {})", logs.display())
}

fn write_summaries(
    own: Option<&Path>,
    wanted: Option<&Path>,
    ended: &JobResult,
) -> Result<(), Failure> {
    let json = ended.summary.to_pretty_json();
    let state = &ended.summary.state;
    let cannot = |path: &Path, error: io::Error, then: String| {
        let path = path.display();
        let text = format!("the job is {state}, but its summary can't be written to {path}: ");
        Failure::failed(text + &error.to_string() + &then)
    };
    if let Some(path) = own {
        jobdir::write_summary(path, json.as_bytes()).map_err(|error| {
            let dir = path.parent().unwrap_or(path).display();
            let then =
                format!("; once it can, `elasticdl train --resume {dir}` writes it and ends");
            cannot(path, error, then)
        })?;
    }
    if let Some(path) = wanted {
        jobdir::write_output(path, json.as_bytes())
            .map_err(|error| cannot(path, error, String::new()))?;
    }
    Ok(())
}
