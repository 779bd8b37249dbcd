//! `elasticdl master`: runs the master of a job in its pod.

use std::fs;
use std::path::PathBuf;

use clap::Args;
use elasticdl_master::cluster_master::ClusterMaster;
use elasticdl_master::kube::leader_lease::Holder;
use elasticdl_master::kube::objects::{CERTIFICATE_FILE, KEY_FILE, TOKEN_FILE};
use elasticdl_master::panics::end_process_on_panic;
use elasticdl_master::progress::Progress;
use elasticdl_proto::{LogFormat, LogLines, LogSource, bytes_of_hex, run_id};
use tracing::error;
use tracing_subscriber::fmt::time::SystemTime;

use crate::args::parse_job_name;
use crate::log_output::LogOutput;
use crate::process::{BLOCKED_MAX, Failure, new_runtime, raise_open_files};
use crate::progress::ProgressLog;

/// Arguments of `elasticdl master`.
#[derive(Args, Debug)]
pub(crate) struct MasterArgs {
    /// Name of the job; its anchor has the specification.
    #[arg(long, value_name = "NAME", value_parser = parse_job_name)]
    pub(crate) job_name: String,

    /// Pod of this master.
    #[arg(long, value_name = "NAME/UID")]
    pub(crate) pod: Holder,

    /// File with the job's token.
    #[arg(long, value_name = "FILE", default_value = TOKEN_FILE)]
    pub(crate) token_file: PathBuf,

    /// TLS certificate of the master, PEM.
    #[arg(long, value_name = "FILE", default_value = CERTIFICATE_FILE)]
    pub(crate) tls_cert: PathBuf,

    /// Private key of the certificate, PEM.
    #[arg(long, value_name = "FILE", default_value = KEY_FILE)]
    pub(crate) tls_key: PathBuf,

    /// Form of the log.
    #[arg(long = "log-format", value_name = "FORMAT", default_value = "text")]
    pub(crate) lines: LogFormat,
}

/// Runs the master of a job to the end of the job. Returns the exit code.
pub(super) fn master(args: MasterArgs) -> Result<u8, Failure> {
    let MasterArgs { job_name, pod, token_file, tls_cert, tls_key, lines } = args;
    let token = fs::read_to_string(&token_file).unwrap_or_default();
    let source = LogSource {
        job: Some(job_name.clone()),
        run_id: bytes_of_hex(token.trim().as_bytes()).map(|token| run_id(&token).to_string()),
        worker: None,
    };
    // The subscriber would report a failed write by `eprintln!`, which panics if standard error
    // fails.
    let logging = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(|| LogOutput)
        .log_internal_errors(false)
        .event_format(LogLines::new(lines, source, SystemTime))
        .try_init();
    // A test in this process may have set another subscriber.
    drop(logging);
    let is_json = lines == LogFormat::Json;
    // The log, which has the panic, is standard error, too.
    end_process_on_panic(is_json.then_some(|_| {}));
    raise_open_files();
    let master = ClusterMaster { job_name, pod, token_file, tls_cert, tls_key };
    let progress = Progress::shown_by(ProgressLog::new(lines));
    let runtime = new_runtime()?;
    let led = runtime.block_on(master.run(progress));
    runtime.shutdown_timeout(BLOCKED_MAX);
    match led {
        Err(Failure { code, text }) if is_json => {
            error!("{text}");
            Ok(code)
        }
        led => led,
    }
}
