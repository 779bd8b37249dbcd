//! The same server over TLS.

use std::error::Error as _;

use tonic::transport::{Certificate, ClientTlsConfig};

use super::*;
use crate::kube::certificates::Certificates;
use crate::service::incoming::UNAUTHENTICATED_MAX;

const NAME: &str = "mnist-master";
const PATIENCE: Duration = Duration::from_secs(60);

fn certificates() -> Certificates {
    Certificates::generate("mnist", &[NAME.into(), "mnist-master.ml.svc".into()]).unwrap()
}

/// A server that shows what `certificates` say, and clients that look for it.
async fn start(certificates: &Certificates) -> ServerFixture {
    let identity = Identity::from_pem(&certificates.certificate, &certificates.key).unwrap();
    ServerFixture::start_with(Some(identity), |address| endpoint(address, &certificates.ca, NAME))
        .await
}

fn endpoint(address: SocketAddr, ca: &str, name: &str) -> Endpoint {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name(name);
    Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap()
}

/// Why no connection comes about: the last cause.
async fn refusal(endpoint: Endpoint) -> String {
    let error = endpoint.connect().await.unwrap_err();
    let mut cause = error.source().unwrap();
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[tokio::test]
async fn who_knows_the_jobs_ca_and_its_masters_name_gets_through() {
    let certificates = certificates();
    let mut fixture = start(&certificates).await;
    fixture.admitted().await;
    fixture.endpoint = endpoint(fixture.address, &certificates.ca, "mnist-master.ml.svc");
    let (_stream, _, outbox) = fixture.admitted().await;
    outbox.refuse("enough".into());
}

#[tokio::test]
async fn another_ca_and_another_name_are_not_taken_for_it() {
    let certificates = certificates();
    let mut fixture = start(&certificates).await;
    let other = self::certificates().ca;
    let why = refusal(endpoint(fixture.address, &other, NAME)).await;
    assert!(why.contains("invalid peer certificate"), "{why}");
    let why = refusal(endpoint(fixture.address, &certificates.ca, "cifar-master")).await;
    assert!(why.contains("not valid for name"), "{why}");
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn nothing_is_said_in_the_open() {
    let mut fixture = start(&certificates()).await;
    // A channel may exist before the server has hung up.
    if let Ok(channel) =
        Endpoint::from_shared(format!("http://{}", fixture.address)).unwrap().connect().await
    {
        let request = with_token(v1::StatusRequest {}, &fixture.token.to_bearer());
        let mut client = MasterClient::new(channel);
        let answer = tokio::time::timeout(PATIENCE, client.status(request)).await;
        assert!(matches!(answer, Ok(Err(_))), "somebody listens");
    }
    fixture.assert_nothing_reached_the_queue().await;
}

#[tokio::test]
async fn peers_that_never_finish_their_handshake_hold_no_place_for_long() {
    let mut fixture = start(&certificates()).await;
    // The head of a record that promises a client's hello, and no more.
    let promise: &[u8] = &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01];
    let mut silent = Vec::new();
    for index in 0..2 * UNAUTHENTICATED_MAX {
        let mut stream = TcpStream::connect(fixture.address).await.unwrap();
        if index % 2 == 0 {
            stream.write_all(promise).await.unwrap();
        }
        silent.push(stream);
    }
    tokio::time::pause();
    for mut stream in silent {
        // A reset is an end as well.
        let mut rest = Vec::new();
        assert!(tokio::time::timeout(MUCH_LATER, stream.read_to_end(&mut rest)).await.is_ok());
    }
    tokio::time::resume();
    let served = tokio::time::timeout(PATIENCE, fixture.assert_nothing_reached_the_queue()).await;
    assert!(served.is_ok(), "there is no place for anybody else");
}

#[tokio::test]
async fn a_handshake_alone_earns_no_place() {
    let mut fixture = start(&certificates()).await;
    let mut mute = Vec::new();
    for _ in 0..UNAUTHENTICATED_MAX {
        mute.push(fixture.endpoint.connect().await.unwrap());
    }
    tokio::time::pause();
    tokio::time::sleep(MUCH_LATER).await;
    tokio::time::resume();
    let served = tokio::time::timeout(PATIENCE, fixture.assert_nothing_reached_the_queue()).await;
    assert!(served.is_ok(), "there is no place for anybody else");
}

#[tokio::test]
async fn who_has_proved_the_token_may_be_silent() {
    start(&certificates()).await.assert_silence_is_allowed().await;
}

#[tokio::test]
async fn bytes_that_are_no_handshake_change_nothing() {
    let mut fixture = start(&certificates()).await;
    let (stream, connection, _outbox) = fixture.admitted().await;
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for bytes in [preface, &[0x16; 4096], &[0x17, 0x03, 0x03, 0xff, 0xff, 0x00], &[0; 70_000]] {
        let mut peer = TcpStream::connect(fixture.address).await.unwrap();
        // The server may hang up while this is being written.
        let _ = peer.write_all(bytes).await;
        let _ = peer.read_to_end(&mut Vec::new()).await;
    }
    // Who was there before is still known_membership.
    stream.outgoing.send(message_of(Kind::Leaving(v1::Leaving {}))).await.unwrap();
    let leaving = fixture.events.recv().await;
    assert!(
        matches!(&leaving, Some(ServerEvent::Message { connection: c, message: FromWorker::Leaving })
            if *c == connection),
        "{leaving:?}"
    );
    fixture.assert_nothing_reached_the_queue().await;
}
