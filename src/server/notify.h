/* SPDX-License-Identifier: Apache-2.0 */
/* Tells the service manager that started the process how far it is, where it wants to know. */
#ifndef PKV_SERVER_NOTIFY_H
#define PKV_SERVER_NOTIFY_H

/* state: "READY=1", "STOPPING=1". Nothing happens without NOTIFY_SOCKET in the environment. */
void pkv_notify(const char *state);

#endif
