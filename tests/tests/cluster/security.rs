//! In a real cluster no object, log or command line shows a secret; network policies allow the
//! connections that a job has, and no others; masters need no right that the manifests do not
//! grant.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use elasticdl_tests::cluster::{Job, Namespace, Peer, allows, kubectl, must, text};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::{ELASTICDL, cluster_tests, namespace};

/// Output of `kubectl get` for these kinds, with all that the objects contain.
fn yaml(namespace: &Namespace, kinds: &str) -> String {
    let get = ["--namespace", namespace.name(), "get", kinds, "-o", "yaml"];
    text(&must(kubectl().args(get)))
}

fn secrets_reach_the_environment_of_the_workers_and_no_other_place() {
    let namespace = namespace("secrets");
    // Without the form of any known credential.
    let [key, token] = ["correct-horse", "battery-staple"];
    namespace.apply(&format!(
        "apiVersion: v1
kind: Secret
metadata: {{name: bucket}}
stringData: {{ACCESS: {key}}}
---
apiVersion: v1
kind: Secret
metadata: {{name: hub}}
stringData: {{the-token: {token}, other: unused-value}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: trainer}}
"
    ));
    let secrets = ["--env-from-secret", "bucket", "--env-from-secret", "HUB=hub:the-token"];
    let options =
        ["--num-workers", "2", "--num-epochs", "25", "--worker-service-account", "trainer"];
    let options = [&options[..], &secrets].concat();
    let dry_run =
        namespace.train("count", &[&options[..], &["--dry-run"]].concat(), &[]).output().unwrap();
    assert!(dry_run.status.success(), "{}", text(&dry_run));
    let job = Job::start(&namespace, "count", &options, 3000);
    let pods = job.wait_for_group(2);
    let environment = |pid: u32| fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    for pod in &pods {
        assert_eq!(pod["spec"]["serviceAccountName"], "trainer");
        let environment = environment(Namespace::process_inside(pod, "counting").unwrap());
        let variables: Vec<&str> = environment.split('\0').collect();
        for variable in [format!("ACCESS={key}"), format!("HUB={token}")] {
            assert!(variables.contains(&variable.as_str()), "{variable}: {variables:?}");
        }
        assert!(!environment.contains("unused-value"), "{variables:?}");
    }
    let worker = Namespace::process_inside(&pods[0], "counting").unwrap();
    let master =
        Namespace::process_inside(&namespace.leader("count").unwrap(), "elasticdl").unwrap();
    let command = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    let logs = |launch: &[&str]| {
        text(&namespace.elasticdl("logs", [&["count"][..], launch].concat()).output().unwrap())
    };
    // The job's own token, too.
    let get = ["--namespace", namespace.name(), "get", "secret", "count"];
    let own = must(kubectl().args(get).args(["-o", "go-template={{.data.token | base64decode}}"]));
    let own = text(&own);
    assert_eq!(own.len(), 64, "the token of the job");
    let places = [
        ("the dry run", text(&dry_run)),
        ("the objects", yaml(&namespace, "jobs,configmaps,pods,services,leases,events")),
        ("the master's environment", environment(master)),
        ("the master's command line", command(master)),
        ("a worker's command line", command(worker)),
        ("the master's log", logs(&[])),
        ("a worker's log", logs(&["--worker", "1"])),
        ("the status", text(&namespace.elasticdl("status", ["count"]).output().unwrap())),
    ];
    for (place, content) in places {
        assert!(!content.is_empty(), "{place} is empty");
        for secret in [key, token, "unused-value", &own] {
            assert!(!content.contains(secret), "{place} contains {secret}");
        }
    }
    assert!(!environment(worker).contains(&own), "the token is in a worker's environment");
    job.assert_completes(25);
}

fn what_a_worker_pod_refers_to_is_checked_before_any_object_is_created() {
    let namespace = namespace("absent");
    for (option, value, kind) in [
        ("--env-from-secret", "bucket:key", "Secret bucket"),
        ("--worker-service-account", "trainer", "service account trainer"),
    ] {
        let options = ["--num-workers", "1", option, value];
        let (code, output) = Job::start(&namespace, "count", &options, 0).wait();
        assert_eq!(code, Some(2), "{output}");
        assert!(output.contains(&format!("{option}: there is no {kind}")), "{output}");
    }
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
}

/// A kubeconfig for a service account of the namespace.
fn kubeconfig_of(namespace: &Namespace, account: &str, file: &Path) {
    let get = |args: &[&str]| {
        text(&must(kubectl().args(["--namespace", namespace.name(), "get"]).args(args)))
    };
    // Newer servers make no such secret by themselves.
    let token = format!("{account}-token");
    namespace.apply(&format!(
        "apiVersion: v1
kind: Secret
type: kubernetes.io/service-account-token
metadata: {{name: {token}, annotations: {{kubernetes.io/service-account.name: {account}}}}}
"
    ));
    namespace.wait_for("count", "the account has a token", || {
        let of_secret = get(&["secret", &token, "-o", "jsonpath={.data.token}"]);
        (!of_secret.trim().is_empty()).then_some(())
    });
    let token = get(&["secret", &token, "-o", "go-template={{.data.token | base64decode}}"]);
    let admin = fs::read_to_string(std::env::var("KUBECONFIG").unwrap()).unwrap();
    let clusters = admin.lines().find(|line| line.starts_with("clusters:")).unwrap();
    let name = clusters.split("name: ").nth(1).unwrap().split(',').next().unwrap();
    let config = format!(
        "apiVersion: v1
kind: Config
{clusters}
users: [{{name: user, user: {{token: {token}}}}}]
contexts: [{{name: user, context: {{cluster: {name}, user: user}}}}]
current-context: user
"
    );
    fs::write(file, config).unwrap();
}

/// Creates the account `user` with this role. Returns its kubeconfig.
fn user_with(namespace: &Namespace, role: &str) -> NamedTempFile {
    namespace.apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: user}\n");
    let user = format!("--serviceaccount={}:user", namespace.name());
    let bind = ["create", "rolebinding", "user", "--role", role, &user];
    must(kubectl().args(["--namespace", namespace.name()]).args(bind));
    let file = NamedTempFile::new().unwrap();
    kubeconfig_of(namespace, "user", file.path());
    file
}

fn a_user_with_the_rights_of_a_submitter_runs_jobs_with_a_role_each() {
    let namespace = Namespace::new("roles", ELASTICDL);
    namespace.apply_shipped("rbac-per-job.yaml");
    let file = user_with(&namespace, "elasticdl-submitter");
    // Without the shared account, there is none but the job's own.
    let shared = ["--num-workers", "1", "--quiet"];
    let refused = namespace.train("count", &shared, &[]).env("KUBECONFIG", file.path()).output();
    assert!(text(&refused.unwrap()).contains("service account elasticdl"));
    let options = ["--num-workers", "2", "--num-epochs", "2", "--per-job-role"];
    let trained = namespace
        .train("count", &options, &["--records", "6000"])
        .env("KUBECONFIG", file.path())
        .output()
        .unwrap();
    assert!(trained.status.success(), "{}", text(&trained));
    // The account of this master reaches its own objects only.
    let account = format!("system:serviceaccount:{}:count-master", namespace.name());
    let may = |what: &[&str]| {
        let command = ["--namespace", namespace.name(), "auth", "can-i", "--as", &account];
        kubectl().args(command).args(what).output().unwrap().status.success()
    };
    for (own, other) in [
        ("configmaps/count", "configmaps/other"),
        ("jobs.batch/count-master", "jobs.batch/other-master"),
    ] {
        assert!(may(&["patch", own]) && !may(&["patch", other]), "{own}");
    }
    assert!(may(&["update", "leases.coordination.k8s.io/count"]));
    assert!(!may(&["update", "leases.coordination.k8s.io/other"]) && !may(&["get", "secrets"]));
    let deleted =
        namespace.elasticdl("delete", ["count"]).env("KUBECONFIG", file.path()).output().unwrap();
    assert!(deleted.status.success(), "{}", text(&deleted));
    namespace
        .wait_for("count", "nothing is left", || namespace.leftovers().is_empty().then_some(()));
}

/// TCP sockets of a pod: listening ports, and for established connections the local port and the
/// peer's address.
fn sockets(pid: u32) -> (Vec<u16>, Vec<(u16, IpAddr)>) {
    let (mut listening, mut established) = (Vec::new(), Vec::new());
    for table in ["tcp", "tcp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let end = |text: &str| {
                let (address, port) = text.split_once(':').unwrap();
                // Words of 32 bits in the byte order of the machine.
                let words = address.as_bytes().chunks(8).map(|word| {
                    u32::from_str_radix(str::from_utf8(word).unwrap(), 16).unwrap().to_le_bytes()
                });
                let bytes: Vec<u8> = words.flatten().collect();
                let address = match <[u8; 4]>::try_from(bytes.as_slice()) {
                    Ok(v4) => IpAddr::V4(Ipv4Addr::from(v4)),
                    Err(_) => Ipv6Addr::from(<[u8; 16]>::try_from(bytes.as_slice()).unwrap())
                        .to_canonical(),
                };
                (address, u16::from_str_radix(port, 16).unwrap())
            };
            match fields[3] {
                "0A" => listening.push(end(fields[1]).1),
                "01" => established.push((end(fields[1]).1, end(fields[2]).0)),
                _ => {}
            }
        }
    }
    (listening, established)
}

fn the_network_policies_allow_the_connections_that_a_job_has_and_metrics_where_asked() {
    let namespace = namespace("network");
    let options = ["--num-workers", "3", "--num-epochs", "25", "--metrics-from", "10.0.0.0/8"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let _ = job.wait_for_group(3);
    let policies = namespace.get("networkpolicies", "app.kubernetes.io/managed-by=elasticdl");
    assert_eq!(policies.len(), 2);
    let pods = namespace.get("pods", "elasticdl/job=count");
    let address = |pod: &Value| pod["status"]["podIP"].as_str().unwrap().parse::<IpAddr>().unwrap();
    let peer = |pod| {
        let pod: &Value = pod;
        Peer { labels: &pod["metadata"]["labels"], namespace: &Value::Null, address: address(pod) }
    };
    let mut seen = Vec::new();
    for pod in &pods {
        let role = pod["metadata"]["labels"]["elasticdl/role"].as_str().unwrap();
        let program = if role == "master" { "elasticdl" } else { "counting" };
        let (listening, established) = sockets(Namespace::process_inside(pod, program).unwrap());
        for (port, from) in established {
            let from = pods.iter().find(|pod| address(pod) == from);
            if let Some(from) = from.filter(|_| listening.contains(&port)) {
                assert!(allows(&policies, peer(from), peer(pod), port), "{port} of {role}");
                seen.push((role, port == 7070));
            }
        }
        let service = json!({"app": "service"});
        let other =
            Peer { labels: &service, namespace: &Value::Null, address: [192, 0, 2, 1].into() };
        for port in listening {
            assert!(!allows(&policies, other, peer(pod), port), "{port} of {role}");
        }
    }
    let control = seen.iter().filter(|connection| **connection == ("master", true)).count();
    assert_eq!(control, 3, "{seen:?}");
    assert!(seen.contains(&("worker", false)), "{seen:?}");
    let page = |job: &str| {
        let master = namespace.leader(job).unwrap();
        let url = format!("http://{}:7071/metrics", address(&master));
        let output = std::process::Command::new("curl").args(["-s", "-m", "10", &url]).output();
        text(&output.unwrap())
    };
    assert!(page("count").contains("elasticdl_step{"), "{}", page("count"));
    job.assert_completes(25);
    let job = Job::start(&namespace, "silent", &["--num-workers", "1"], 4000);
    let _ = job.wait_for_group(1);
    assert!(page("silent").contains("not served"), "{}", page("silent"));
    job.assert_completes(1);
}

fn events_name_the_users_who_scale_stop_and_delete_a_job() {
    let namespace = namespace("audit");
    // A user who may change ConfigMaps and Jobs, and must not create Events.
    let role = ["create", "role", "user", "--verb", "get,list,watch,patch,delete"];
    let of = ["--resource", "configmaps,jobs.batch,pods", "--namespace", namespace.name()];
    must(kubectl().args(role).args(of));
    let file = user_with(&namespace, "user");
    let account = format!("system:serviceaccount:{}:user", namespace.name());
    let job =
        Job::start(&namespace, "count", &["--num-workers", "1", "--num-epochs", "1000"], 4000);
    let _ = job.wait_for_group(1);
    let run = |command: &str, args: &[&str], is_admin: bool| {
        let mut command = namespace.elasticdl(command, args);
        if !is_admin {
            command.env("KUBECONFIG", file.path());
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    };
    run("scale", &["count", "--num-workers", "2"], true);
    job.wait_for_report("ScaleRequested", "admin requests 2 workers");
    run("scale", &["count", "--num-workers", "1"], false);
    job.wait_for_report("ScaleRequested", &format!("{account} requests 1 workers"));
    run("delete", &["count"], false);
    job.wait_for_report("DeletionRequested", &format!("{account} deletes the job"));
    let count = |reason: &str| {
        let events =
            must(kubectl().args(["--namespace", namespace.name(), "get", "events"]).args([
                "-o",
                "json",
                "--field-selector",
                &format!("reason={reason}"),
            ]));
        let list: Value = serde_json::from_slice(&events.stdout).unwrap();
        list["items"].as_array().unwrap().len()
    };
    assert_eq!((count("ScaleRequested"), count("DeletionRequested")), (2, 1));
    let mut job =
        Job::start(&namespace, "again", &["--num-workers", "1", "--num-epochs", "1000"], 4000);
    let _ = job.wait_for_group(1);
    run("stop", &["again"], false);
    job.wait_for_report("StopRequested", &format!("{account} requests that the job stops"));
    let (code, output) = job.wait();
    assert_eq!(code, Some(143), "{output}");
    assert!(output.contains("are not renewed while it runs"), "{output}");
    job.assert_deletes();
}

cluster_tests![
    secrets_reach_the_environment_of_the_workers_and_no_other_place,
    what_a_worker_pod_refers_to_is_checked_before_any_object_is_created,
    a_user_with_the_rights_of_a_submitter_runs_jobs_with_a_role_each,
    the_network_policies_allow_the_connections_that_a_job_has_and_metrics_where_asked,
    events_name_the_users_who_scale_stop_and_delete_a_job,
];
