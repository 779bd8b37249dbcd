//! `elasticdl doctor`: checks whether jobs can run here, and says how to fix what is missing.

mod finding;
mod machine;

use clap::Args;
use elasticdl_master::jobdir;
use elasticdl_master::kube::client::{Cluster, ClusterChoice, ClusterError};
use elasticdl_master::kube::rights;

use crate::args::ClusterTarget;
use crate::process::{EXIT_FAILED, EXIT_OK, Failure, new_runtime, print};
use finding::{Finding, to_table};

/// Arguments of `elasticdl doctor`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub(crate) struct DoctorArgs {
    /// Check this machine only.
    #[arg(long, conflicts_with_all = ["namespace", "context"])]
    pub(crate) local: bool,

    /// Also check write access to this folder on this machine. The workers of a job check buckets,
    /// with their credentials, before training starts.
    #[arg(long, value_name = "DIR", value_parser = parse_folder)]
    pub(crate) storage: Vec<std::path::PathBuf>,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

fn parse_folder(text: &str) -> Result<std::path::PathBuf, String> {
    match text.split_once("://") {
        Some((scheme, _)) if scheme != "file" => Err(format!(
            "it is not a folder of this machine; a job checks {scheme}:// addresses with the \
             credentials of its workers, before training begins"
        )),
        Some((_, path)) => Ok(path.into()),
        None => Ok(text.into()),
    }
}

/// Checks this machine, and the cluster if one is configured. Returns the exit code.
pub(super) fn doctor(args: &DoctorArgs) -> Result<u8, Failure> {
    let mut findings = machine::check();
    findings.push(machine::check_folder("job folder", &jobdir::default_root()));
    findings.extend(args.storage.iter().map(|folder| machine::check_folder("storage", folder)));
    if !args.local {
        if args.target.is_given() || Cluster::is_configured() {
            findings.extend(new_runtime()?.block_on(check_cluster(&args.target.choice())));
        } else {
            let text = "none is configured; jobs run with --local";
            findings.push(Finding::good("cluster", text));
        }
    }
    print(&to_table(&findings))?;
    let prevents = findings.iter().any(Finding::prevents_jobs);
    Ok(if prevents { EXIT_FAILED } else { EXIT_OK })
}

async fn check_cluster(choice: &ClusterChoice) -> Vec<Finding> {
    let cluster = match Cluster::connect(choice).await {
        Ok(cluster) => cluster,
        Err(error) => {
            let remedy = "correct the file that KUBECONFIG names, or ~/.kube/config, until \
                          `kubectl get pods` works";
            return vec![Finding::problem("cluster", error.to_string(), remedy)];
        }
    };
    let at = &cluster.namespace;
    let missing = match rights::missing(&cluster).await {
        Ok(missing) => missing,
        Err(error) => {
            let remedy = "check the network, and the server and the credentials of the kubeconfig \
                          with `kubectl get pods`";
            return vec![Finding::problem("cluster", error.to_string(), remedy)];
        }
    };
    let mut findings =
        vec![Finding::good("cluster", format!("the API server answers; the namespace is {at}"))];
    findings.push(if missing.is_empty() {
        Finding::good("rights", "you may submit and follow jobs")
    } else {
        let text = format!("you may not {}", missing.join(", "));
        let remedy = format!(
            "ask an administrator for the cluster role `edit`: kubectl create rolebinding NAME \
             --clusterrole edit --user YOU --namespace {at}"
        );
        Finding::problem("rights", text, remedy)
    });
    findings.push(service_account(&cluster, rights::has_service_account(&cluster).await));
    findings
}

fn service_account(cluster: &Cluster, found: Result<bool, ClusterError>) -> Finding {
    let namespace = &cluster.namespace;
    match found {
        Ok(true) => Finding::good("master", "its service account `elasticdl` exists"),
        Ok(false) => {
            let text = format!("there is no service account `elasticdl` in {namespace}");
            let remedy = format!(
                "sed 's/namespace: elasticdl/namespace: {namespace}/' manifests/rbac.yaml \
                 | kubectl apply -f -; or submit with --service-account or --per-job-role"
            );
            Finding::problem("master", text, remedy)
        }
        Err(error) => Finding::warning(
            "master",
            format!("its service account can't be looked up: {error}"),
            "make sure that manifests/rbac.yaml is applied in the namespace",
        ),
    }
}

const AFTER_HELP: &str = "\
Each line is `ok`, a `warning` or a `problem`, with the remedy below it.

Exit codes:
  0  no problem was found
  1  a problem prevents jobs
  2  invalid command line";
