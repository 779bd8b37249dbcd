//! Masters as processes, each in a network namespace of its own with its pod's address.
//!
//! ```text
//!   this program, API server ── bridge ──┬── namespace of a master, with eth0
//!                                        └── …
//! ```
//!
//! A master listens on the ports of its pod and reaches the API server through the bridge, with a
//! token of its service account.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccount};
use kube::api::PostParams;
use kube::config::{AuthInfo, Context, Kubeconfig, NamedContext};
use kube::{Api, Client};
use rustix::process::Signal as UnixSignal;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::Fault;
use crate::worker::{Signal, Target};

/// What masters need from the machine.
#[derive(Debug)]
pub(crate) struct Masters {
    /// Folder of their credentials and logs.
    folder: PathBuf,
    kubeconfig: Kubeconfig,
}

/// A master's process to be.
#[derive(Debug)]
pub(crate) struct Master {
    command: Command,
    /// How workers reach it.
    pub(crate) target: Target,
}

/// The bridge between the masters and the API server. Dropping it removes it, the masters' network
/// namespaces and the processes in them.
#[derive(Debug)]
pub(crate) struct Bridge(());

impl Bridge {
    /// Makes the bridge. What an earlier run left behind is removed.
    pub(crate) fn new() -> Result<Self, Fault> {
        remove_network();
        ip(&format!("link add {BRIDGE} type bridge"))?;
        let bridge = Self(());
        ip(&format!("addr add {}/16 dev {BRIDGE}", address(0)))?;
        ip(&format!("link set {BRIDGE} up"))?;
        Ok(bridge)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        remove_network();
    }
}

impl Masters {
    /// `folder`: where their credentials and logs are written.
    pub(crate) fn new(folder: &Path) -> Result<Self, Fault> {
        Ok(Self { folder: folder.to_owned(), kubeconfig: Kubeconfig::read()? })
    }

    /// Prepares the master of a pod: its network, its credentials and its command.
    pub(crate) async fn prepare(
        &self,
        client: &Client,
        pod: &Pod,
        job: &str,
        number: u32,
    ) -> Result<Master, Fault> {
        let metadata = &pod.metadata;
        let name = metadata.name.as_deref().ok_or("a pod without a name")?;
        let namespace = metadata.namespace.as_deref().ok_or("a pod without a namespace")?;
        let spec = pod.spec.as_ref().ok_or("a pod without a spec")?;
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder)?;
        let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
        let secret = secrets.get(job).await?.data.ok_or("a Secret without data")?;
        let key =
            |key: &str| secret.get(key).ok_or_else(|| format!("the Secret {job} has no {key}"));
        let mut arguments = Vec::new();
        for (option, name) in
            [("--token-file", "token"), ("--tls-cert", "tls.crt"), ("--tls-key", "tls.key")]
        {
            let file = folder.join(name);
            fs::write(&file, &key(name)?.0)?;
            arguments.extend([option.into(), file.into_os_string()]);
        }
        let account = spec.service_account_name.as_deref().ok_or("a pod without an account")?;
        let kubeconfig = folder.join("kubeconfig");
        let access = self.access(client, namespace, account).await?;
        fs::write(&kubeconfig, serde_json::to_vec(&access)?)?;
        let network = tokio::task::spawn_blocking(move || make_namespace(number));
        let host = network.await??;
        let container = spec.containers.first().ok_or("a pod without a container")?;
        let uid = metadata.uid.as_deref().unwrap_or_default();
        // The kubelet expands references to the container's environment.
        let expand = |text: &String| text.replace("$(POD_NAME)", name).replace("$(POD_UID)", uid);
        let log = File::create(folder.join("log"))?;
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &host])
            .arg(std::env::current_exe()?)
            .args(container.args.iter().flatten().map(expand))
            .args(arguments)
            .env("KUBECONFIG", kubeconfig)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true);
        let text = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        let target = Target {
            job: job.into(),
            address: (address(number), MASTER_PORT).into(),
            name: format!("{job}-master"),
            ca: text(&key("ca.crt")?.0),
            token: text(&key("token")?.0),
        };
        Ok(Master { command, target })
    }

    /// A kubeconfig with which a process behind the bridge acts as a service account.
    async fn access(
        &self,
        client: &Client,
        namespace: &str,
        account: &str,
    ) -> Result<Kubeconfig, Fault> {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        let request = TokenRequest { spec: TokenRequestSpec::default(), ..TokenRequest::default() };
        let params = PostParams::default();
        let answer = accounts.create_token_request(account, &params, &request).await?;
        let token = answer.status.ok_or("no token in the server's answer")?.token;
        let mut config = self.kubeconfig.clone();
        let cluster = config.clusters.first_mut().and_then(|named| named.cluster.as_mut());
        let cluster = cluster.ok_or("the kubeconfig has no cluster")?;
        let port = cluster.server.as_deref().and_then(|server| server.rsplit(':').next());
        cluster.server = Some(format!("https://{}:{}", address(0), port.unwrap_or("443")));
        // A name that every API server's certificate has.
        cluster.tls_server_name = Some("kubernetes".into());
        let cluster = config.clusters[0].name.clone();
        let user = config.auth_infos.first_mut().ok_or("the kubeconfig has no user")?;
        user.auth_info = Some(AuthInfo { token: Some(token.into()), ..AuthInfo::default() });
        let context = Context {
            cluster,
            user: Some(user.name.clone()),
            namespace: Some(namespace.into()),
            ..Context::default()
        };
        let name = "master".to_owned();
        config.contexts =
            vec![NamedContext { name, context: Some(context), other: BTreeMap::default() }];
        config.current_context = Some("master".into());
        Ok(config)
    }
}

impl Master {
    /// Runs the master to its end, and returns its exit code.
    pub(crate) async fn run(mut self, mut signal: watch::Receiver<Signal>) -> i32 {
        let Ok(mut child) = self.command.spawn() else { return EXIT_NOT_STARTED };
        let mut kill_at: Option<Instant> = None;
        loop {
            tokio::select! {
                status = child.wait() => {
                    return status.ok().and_then(|status| status.code()).unwrap_or(EXIT_SIGKILL);
                }
                Ok(()) = signal.changed() => match *signal.borrow_and_update() {
                    Signal::Run => {}
                    Signal::Kill => kill_at = Some(Instant::now()),
                    Signal::Terminate(grace) => {
                        if let Some(pid) = child.id() {
                            elasticdl_tests::send(pid, UnixSignal::TERM);
                        }
                        kill_at = Some(Instant::now() + grace);
                    }
                },
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                    kill_at = None;
                    let _ = child.start_kill();
                }
            }
        }
    }
}

/// The address of a pod by its number, from 1; that of the bridge is number 0.
pub(crate) fn address(number: u32) -> Ipv4Addr {
    let [_, _, high, low] = (number + 1).to_be_bytes();
    Ipv4Addr::new(10, 79, high, low)
}

/// Makes the network namespace of a pod. Returns its name.
fn make_namespace(number: u32) -> Result<String, Fault> {
    let (name, link) = (format!("{PREFIX}{number}"), format!("{BRIDGE}{number}"));
    ip(&format!("netns add {name}"))?;
    ip(&format!("link add {link} type veth peer name eth0 netns {name}"))?;
    ip(&format!("link set {link} master {BRIDGE} up"))?;
    ip(&format!("-n {name} addr add {}/16 dev eth0", address(number)))?;
    ip(&format!("-n {name} link set lo up"))?;
    ip(&format!("-n {name} link set eth0 up"))?;
    Ok(name)
}

/// Removes the namespaces, with the processes in them, and the bridge.
fn remove_network() {
    let listed = ip("netns list").unwrap_or_default();
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    for name in names.filter(|name| name.starts_with(PREFIX)) {
        for pid in ip(&format!("netns pids {name}")).unwrap_or_default().lines() {
            if let Ok(pid) = pid.parse() {
                elasticdl_tests::send(pid, UnixSignal::KILL);
            }
        }
        // The links of a namespace go with it.
        let _ = ip(&format!("netns del {name}"));
    }
    let _ = ip(&format!("link del {BRIDGE}"));
}

fn ip(words: &str) -> Result<String, Fault> {
    let output = std::process::Command::new("ip").args(words.split(' ')).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("ip {words}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}

const BRIDGE: &str = "edlshare";
const PREFIX: &str = "edl-sharing-";
const MASTER_PORT: u16 = 7070;
const EXIT_NOT_STARTED: i32 = 128;
const EXIT_SIGKILL: i32 = 137;
