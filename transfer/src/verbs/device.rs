//! The devices of this node: found, opened, and watched for ports that go down and come back.

use super::ffi::{DeviceEvents, PortEvent};
use super::wire::Gid;
use crate::choice::{Choice, DeviceError, DeviceName};
use futures::future::select_all;
use sideway::ibverbs::address::GidType;
use sideway::ibverbs::device::{DeviceInfo as _, DeviceList};
use sideway::ibverbs::device_context::{DeviceContext, LinkLayer, Mtu, PortState};
use std::io;
use std::net::Ipv6Addr;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// One port of one device, open.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) context: Arc<DeviceContext>,
    pub(super) port: u8,
    pub(super) gid_index: u8,
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) mtu: Mtu,
    /// Whether its port is active.
    pub(super) up: watch::Receiver<bool>,
    watch: AbortHandle,
}

impl Drop for Device {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

/// The devices that a node uses; clones are the same.
#[derive(Clone, Debug)]
pub struct Devices(pub(super) Arc<[Device]>);

impl Devices {
    /// Opens what was chosen; none for `off`.
    ///
    /// # Errors
    /// [`DeviceError`]
    pub async fn open(choice: &Choice) -> Result<Option<Self>, DeviceError> {
        let choice = choice.clone();
        tokio::task::spawn_blocking(move || open(&choice))
            .await
            .unwrap_or_else(|e| Err(DeviceError::List(e.to_string())))
    }

    /// Their names.
    pub fn names(&self) -> Vec<&str> {
        self.0.iter().map(|d| d.name.as_str()).collect()
    }
}

fn open(choice: &Choice) -> Result<Option<Devices>, DeviceError> {
    if *choice == Choice::Off {
        return Ok(None);
    }
    let list = DeviceList::new().map_err(|e| DeviceError::List(why(&e)))?;
    if let Choice::Named(names) = choice {
        let all: Result<Vec<_>, _> = names.iter().map(|n| open_named(&list, n)).collect();
        return Ok(Some(Devices(all?.into())));
    }
    let any = |name| DeviceName {
        name,
        port: None,
        gid_index: None,
    };
    let first = list.iter().find_map(|d| open_named(&list, &any(d.name())).ok());
    Ok(Some(Devices([first.ok_or(DeviceError::None)?].into())))
}

/// An error with its causes: those of `sideway` say little alone.
pub(super) fn why(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn open_named(list: &DeviceList, wanted: &DeviceName) -> Result<Device, DeviceError> {
    let Some(device) = list.iter().find(|d| d.name() == wanted.name) else {
        let here: Vec<String> = list.iter().map(|d| d.name()).collect();
        return Err(DeviceError::Unknown {
            name: wanted.name.clone(),
            here: here.join(", "),
        });
    };
    let bad = |what: String| DeviceError::Unusable {
        device: wanted.to_string(),
        what,
    };
    let context = device.open().map_err(|e| bad(why(&e)))?;
    let ports = context.query_device().map_err(|e| bad(why(&e)))?.phys_port_cnt();
    let active = |port: &u8| {
        context
            .query_port(*port)
            .is_ok_and(|p| p.port_state() == PortState::Active)
    };
    // A port that was named may come up later.
    let port = match wanted.port {
        Some(port) if (1..=ports).contains(&port) => port,
        Some(_) => return Err(bad(format!("it has {ports} ports"))),
        None => (1..=ports)
            .find(active)
            .ok_or_else(|| bad("none of its ports is active".to_owned()))?,
    };
    let is_up = active(&port);
    let facts = context.query_port(port).map_err(|e| bad(why(&e)))?;
    let (gid_index, gid) = gid(&context, port, wanted.gid_index, facts.link_layer())
        .map_err(bad)?
        .ok_or_else(|| {
            bad("its port has no RoCE v2 address: give it an IPv4 address, or name a GID index".to_owned())
        })?;
    let (up, watch) = watch(&context, port, is_up).map_err(|e| bad(e.to_string()))?;
    Ok(Device {
        name: wanted.name.clone(),
        port,
        gid_index,
        gid,
        lid: facts.lid(),
        mtu: facts.active_mtu(),
        context,
        up,
        watch,
    })
}

/// The address of a port: the one asked for, or the first that peers in other subnets can reach.
fn gid(context: &DeviceContext, port: u8, index: Option<u8>, layer: LinkLayer) -> Result<Option<(u8, Gid)>, String> {
    let table = context.query_gid_table().map_err(|e| why(&e))?;
    let on_port = table.iter().filter(|g| g.port_num() == u32::from(port));
    let mut usable = on_port.filter(|g| match index {
        Some(index) => g.gid_index() == u32::from(index),
        None if layer == LinkLayer::InfiniBand => g.gid_type() == GidType::InfiniBand,
        None => g.gid_type() == GidType::RoceV2 && Ipv6Addr::from(g.gid().raw).to_ipv4_mapped().is_some(),
    });
    Ok(usable.next().map(|g| (g.gid_index() as u8, g.gid().raw)))
}

/// Follows the state of a port, until aborted.
fn watch(context: &Arc<DeviceContext>, port: u8, is_up: bool) -> io::Result<(watch::Receiver<bool>, AbortHandle)> {
    let events = DeviceEvents::watched(context.clone())?;
    let (state, up) = watch::channel(is_up);
    let follow = async move {
        while let Ok(mut ready) = events.readable().await {
            match ready.try_io(|events| events.get_ref().take()) {
                Ok(Ok(PortEvent::Up(at))) if at == port => _ = state.send_replace(true),
                Ok(Ok(PortEvent::Down(at))) if at == port => _ = state.send_replace(false),
                Ok(Ok(PortEvent::Lost) | Err(_)) => {
                    state.send_replace(false);
                    return;
                }
                // Another port's, another event, or none after all.
                Ok(Ok(_)) | Err(_) => {}
            }
        }
    };
    Ok((up, tokio::spawn(follow).abort_handle()))
}

/// Waits until a port goes down.
pub(super) async fn down(devices: &Devices) -> io::Error {
    let each = devices.0.iter().map(|device| {
        let mut up = device.up.clone();
        Box::pin(async move {
            // An error means that nobody watches it any more.
            let _ = up.wait_for(|up| !up).await;
            device.name.as_str()
        })
    });
    let (name, ..) = select_all(each).await;
    io::Error::new(
        io::ErrorKind::NetworkDown,
        format!("the port of RDMA device {name} is down"),
    )
}
